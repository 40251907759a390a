# SPDX-License-Identifier: Apache-2.0
"""Images of files, decoded once: one array in a file that all processes map into memory."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
from pathlib import Path

import numpy as np

from oktopk.train.tasks.images.folders import Split, open_source
from oktopk.utils.extras import require
from oktopk.utils.files import error_summary, file_error

log = logging.getLogger("oktopk")

FORMAT = "images 1: RGB, uint8, (number, channel, row, column)"
DEFAULT_CACHE = Path("data") / "cache"


def open_images(splits: tuple[Split, Split], cache: str, size: int) -> np.ndarray:
    """(N, 3, height, width) uint8: the images of both splits, mapped from the cache.

    If they are not in it they are decoded first. The file is named after a hash of the settings and
    of the paths, sizes and times of the images. It is renamed when complete, so several processes
    may make it at the same time.
    """
    folder = Path(cache) if cache else DEFAULT_CACHE
    path = folder / f"{_key(splits, size)}.npy"
    number = sum(len(split.files) for split in splits)
    if not path.is_file():
        log.info("decoding %d images into %s", number, path)
        folder.mkdir(parents=True, exist_ok=True)
        _build(splits, size, path)
    damaged = file_error(path, "is damaged", advice="remove it, it will be made again")
    try:
        images = np.load(path, mmap_mode="c")  # torch warns of arrays that cannot be written
    except (ValueError, EOFError) as error:
        raise damaged from error
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:2] != (number, 3):
        raise damaged
    return images


def first_size(split: Split, size: int) -> tuple[int, int]:
    """Height and width of the first image."""
    with open_source(split.where) as (_, read):
        return decode(read(split.files[0]), split, 0, size).shape[1:]


def decode(content: bytes, split: Split, index: int, size: int) -> np.ndarray:
    """(3, height, width) uint8 of a JPEG or PNG, resized to `size` unless it is 0."""
    require("oktopk train --task images with --data", "PIL")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            colours = image.convert("RGB")
    except Exception as error:  # a damaged image may raise any exception
        # the message of this one has only the address of a buffer
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error_summary(error)})"
        raise file_error(
            split.where,
            f"is not a JPEG or PNG that can be read{why}",
            place=split.files[index],
            advice="remove or replace it",
        ) from error
    if size:
        colours = colours.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(colours).transpose(2, 0, 1)


def _key(splits: tuple[Split, Split], size: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {size}".encode())
    for split in splits:
        root = split.where.resolve()
        files = [root] if root.is_file() else [root / name for name in split.files]
        for file in files:
            status = file.stat()
            digest.update(repr((str(file), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:32]


def _build(splits: tuple[Split, Split], size: int, path: Path) -> None:
    number = sum(len(split.files) for split in splits)
    height, width = first_size(splits[0], size)
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        images = np.lib.format.open_memmap(draft, "w+", np.uint8, (number, 3, height, width))
        row = 0
        for split in splits:
            _fill(images[row : row + len(split.files)], split, size)
            row += len(split.files)
        images.flush()
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _fill(rows: np.ndarray, split: Split, size: int) -> None:
    height, width = rows.shape[2:]
    with open_source(split.where) as (_, read):
        for index, name in enumerate(split.files):
            image = decode(read(name), split, index, size)
            if image.shape[1:] != (height, width):
                raise file_error(
                    split.where,
                    f"is {image.shape[1]} x {image.shape[2]}, and the first image is {height} x "
                    f"{width}",
                    place=name,
                    advice=f"give --size {min(height, width)} or another size to resize all images",
                )
            rows[index] = image
