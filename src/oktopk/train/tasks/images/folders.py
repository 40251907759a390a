# SPDX-License-Identifier: Apache-2.0
"""Which images a folder or a zip archive has, and of which classes.

    DATA/train/CLASS/*.jpg and DATA/test/CLASS/*.jpg   a folder
    DATA.zip with the same inside                      an archive
    DATA/train.zip and DATA/test.zip                   an archive for each

Images are JPEG or PNG. Names that begin with a dot or with "__" are ignored: archivers add them.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from oktopk.utils.files import file_error, read_bytes
from oktopk.utils.units import list_some

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
