# SPDX-License-Identifier: Apache-2.0
"""Images: found in folders and archives, decoded once, and augmented."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from oktopk.lab.tasks.options import ImagesOptions, check_images
from oktopk.utils.arguments import list_some
from oktopk.utils.extras import require
from oktopk.utils.files import error_summary, file_error, read_bytes

# Which images a folder or a zip archive has, and of which classes.
#
#     DATA/train/CLASS/*.jpg and DATA/test/CLASS/*.jpg   a folder
#     DATA.zip with the same inside                      an archive
#     DATA/train.zip and DATA/test.zip                   an archive for each
#
# Images are JPEG or PNG. Names that begin with a dot or with "__" are ignored: archivers add them.


SPLITS = ("train", "test")
ENDINGS = (".jpg", ".jpeg", ".png")
LAYOUT = "it must have train/CLASS/*.jpg|png and test/CLASS/..., or train.zip and test.zip"
Read = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Split:
    """The images to train on, or those to test with."""

    name: str
    where: Path
    """A folder or a zip archive."""

    classes: list[str]
    files: list[str]
    """Paths in the folder or the archive, sorted by class."""

    labels: list[int]


def find_images(data: str) -> tuple[Split, Split]:
    """The images to train on and to test with. FileError says in one line what is wrong."""
    root = Path(data)
    if not root.is_dir() and not root.is_file():
        raise file_error(data, "there is no such folder or zip archive", advice=LAYOUT)
    archives = {name: root / f"{name}.zip" for name in SPLITS}
    if all(path.is_file() for path in archives.values()):
        train, test = (_find_split(name, path) for name, path in archives.items())
    else:
        train, test = (_find_split(name, root) for name in SPLITS)
    for one, other in ((train, test), (test, train)):
        missing = sorted(set(one.classes) - set(other.classes))
        if missing:
            raise file_error(
                data,
                f"the classes differ: {list_some(missing, 3)} in {one.name}, but not in "
                f"{other.name}",
                advice="add the missing folders, or remove the others",
            )
    if len(train.classes) < 2:
        raise file_error(data, f"has only the class {train.classes[0]}", advice="add another")
    return train, test


def _find_split(name: str, where: Path) -> Split:
    found: dict[str, list[str]] = {}
    with open_source(where) as (names, _):
        for path in names:
            place = _class_of(path, name, own=where.name == f"{name}.zip")
            if place is not None:
                files = found.setdefault(place, [])
                files += [path] * (not path.endswith("/"))
    if not found:
        raise file_error(where, f"has no class folders for {name}", advice=LAYOUT)
    for place, files in sorted(found.items()):
        if not files:
            raise file_error(
                where, f"{name}/{place} has no *.jpg or *.png", advice="add images, or remove it"
            )
    classes = sorted(found)
    return Split(
        name,
        where,
        classes,
        [file for place in classes for file in sorted(found[place])],
        [label for label, place in enumerate(classes) for _ in found[place]],
    )


def _class_of(path: str, split: str, own: bool) -> str | None:
    """The class of an image or of a class folder; None for anything else.

    An archive of its `own` for a split may lack the folder of the split.
    """
    parts = PurePosixPath(path).parts
    if any(part.startswith((".", "__")) for part in parts):
        return None
    if own and split not in parts:
        parts = (split, *parts)
    if path.endswith("/"):
        return parts[-1] if parts[-2:-1] == (split,) else None
    is_image = path.lower().endswith(ENDINGS)
    return parts[-2] if is_image and parts[-3:-2] == (split,) else None


@contextmanager
def open_source(where: Path) -> Iterator[tuple[list[str], Read]]:
    """The names in a folder or an archive, those of folders with a slash, and how to read one."""
    if where.is_dir():
        yield _names_in(where), lambda name: read_bytes(where / name)
        return
    try:
        with zipfile.ZipFile(where) as archive:
            yield archive.namelist(), lambda name: _read_member(archive, name)
    except zipfile.BadZipFile as error:
        raise file_error(
            where, f"is not a zip archive, or is damaged ({error})", advice="get it again"
        ) from error


def _names_in(root: Path) -> list[str]:
    """All names two folders deep: split, class, image."""
    names = []
    for split in SPLITS:
        for folder, folders, files in os.walk(root / split):
            inside = Path(folder).relative_to(root).as_posix()
            names += [f"{inside}/{name}/" for name in folders]
            names += [f"{inside}/{name}" for name in files]
            if inside != split:
                folders.clear()
    return names


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    # encrypted, of an unknown compression, or damaged
    except (RuntimeError, NotImplementedError, zlib.error, EOFError) as error:
        problem = f"cannot be read ({error})"
        raise file_error(archive.filename or "", problem, place=name) from error


# Images of files, decoded once: one array in a file that all processes map into memory.


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


# Images and labels in memory, of files or of scikit-learn's digits.


DIGITS = "scikit-learn's digits"
DIGIT_SIZE = 8
NEEDED_FOR_DIGITS = ("oktopk train --task images without --data", "sklearn")
CHUNK = 4096
"""Images of which a sum is taken at once."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The images to train on, then those to test with."""

    classes: list[str]
    images: Tensor
    """(N, channels, height, width) uint8."""

    labels: Tensor
    """(N,) int64."""

    num_train: int


def check_data(options: ImagesOptions) -> None:
    """Raise if images or classes are missing. It decodes one image only."""
    if options.data:
        train, _ = find_images(options.data)
        check_images(options, *first_size(train, options.size), options.data)
    else:
        require(*NEEDED_FOR_DIGITS)
        side = options.size or DIGIT_SIZE
        check_images(options, side, side, DIGITS)


def read_dataset(options: ImagesOptions) -> Dataset:
    """The images of `options.data`, decoded if they are not in the cache, or the digits."""
    if not options.data:
        return read_digits(options)
    splits = find_images(options.data)
    images = torch.from_numpy(open_images(splits, options.cache, options.size))
    height, width = images.shape[2:]
    check_images(options, height, width, options.data)
    labels = torch.tensor([label for split in splits for label in split.labels])
    train = splits[0]
    return Dataset(train.classes, images, labels, len(train.files))


def read_digits(options: ImagesOptions) -> Dataset:
    """1,797 grey images of 8 x 8. Every third is for testing."""
    require(*NEEDED_FOR_DIGITS)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) * (240 / 16)  # digits have 17 shades
    images = images.view(-1, 1, DIGIT_SIZE, DIGIT_SIZE)
    if options.size:
        images = interpolate(images, (options.size, options.size), mode="bilinear").round_()
    is_test = np.arange(len(labels)) % 3 == 0
    order = torch.from_numpy(np.argsort(is_test, kind="stable"))
    classes = [str(digit) for digit in range(10)]
    return Dataset(
        classes, images.to(torch.uint8)[order], torch.tensor(labels)[order], int((~is_test).sum())
    )


def mean_and_deviation(images: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel, float32. From sums of integers, which are the same bits everywhere."""
    total = torch.zeros(2, images.shape[1], dtype=torch.int64)
    for part in images.split(CHUNK):
        values = part.to(torch.int32)
        total[0] += values.sum((0, 2, 3))
        total[1] += values.square_().sum((0, 2, 3))
    mean, square = total.double() / (images.numel() // images.shape[1])
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    # a channel that is the same everywhere becomes 0
    return mean.float(), torch.where(deviation > 0, deviation, 1.0).float()


# Random shifts and flips of training images, as is usual for CIFAR-10.


SHIFT_BITS = 16
"""Bits of the hash for each of the two shifts; the bit above them decides about the flip."""


def augment(images: Tensor, bits: np.ndarray, crop: int, flip: bool) -> Tensor:
    """Shift each image by up to `crop` pixels with zeros around, and mirror half of them.

    `bits` are 64 random bits for each image, uint64.
    """
    height, width = images.shape[2:]
    padded = pad(images, [crop] * 4)
    result = torch.empty_like(images)
    for i, word in enumerate(bits.tolist()):
        top, left = ((word >> shift) % 2**SHIFT_BITS % (2 * crop + 1) for shift in (0, SHIFT_BITS))
        window = padded[i, :, top : top + height, left : left + width]
        is_mirrored = flip and word >> 2 * SHIFT_BITS & 1
        result[i] = window.flip(-1) if is_mirrored else window
    return result
