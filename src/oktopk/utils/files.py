# SPDX-License-Identifier: Apache-2.0
"""Reading files that others may have written or damaged, and writing files atomically.

Every reader checks what it reads. It raises `FileError`, which names the file, the place in it and
what to do.
"""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import stat
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""The largest text file that is read into memory."""
MAX_SHOWN = 300
"""How many characters of another library's message are shown."""


class FileError(ValueError):
    """A file that cannot be used. The message is one line: `PATH: place: problem; advice`."""


def file_error(path: Path | str, problem: str, *, place: str = "", advice: str = "") -> FileError:
    """Return the error for a file, with the place in it and what to do where they are known."""
    where = f"{path}: {place}" if place else str(path)
    return FileError(f"{where}: {single_line(problem)}" + (f"; {advice}" if advice else ""))


def single_line(text: object) -> str:
    """Return any text as one line of limited length; what cannot be printed is escaped."""
    line = " ".join(str(text).encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."


def error_summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return single_line(f"{type(error).__name__}: {lines[0]}")


def is_file(path: Path) -> bool:
    """Whether the file exists. A name that is too long for the file system is not an error."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Pipes may never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise file_error(path, "is not a regular file", advice="give the path of a file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise file_error(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise file_error(path, f"cannot be read ({error})") from error  # a NUL in its name
    if len(content) > most:
        raise file_error(path, f"has more than {most} bytes", advice="is it the right file?")
    return content


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """Return the content of a UTF-8 file, without a byte order mark."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise file_error(path, found, place=f"line {line}", advice="save it as UTF-8") from error


def parse_toml(text: str, path: Path | str) -> dict[str, Any]:
    """Return the values of a TOML text that was read from `path`."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise file_error(path, f"is not valid TOML ({error})", advice="correct the file") from error


def read_json(path: Path, kind: type[T], advice: str = "") -> T:
    """Return the JSON of a file as `kind`: a msgspec struct or any type that msgspec knows."""
    content = read_bytes(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:
        problem, place = _problem_and_place(error)
        raise file_error(path, problem, place=place, advice=advice) from error


def convert(value: Any, kind: type[T], path: Path | str, advice: str = "") -> T:
    """Return a value that was read from `path` as `kind`; raise FileError if the types differ."""
    try:
        return msgspec.convert(value, kind)
    except (AttributeError, TypeError) as error:  # of an object that msgspec takes for a mapping
        problem = f"holds an object of an unexpected type ({error_summary(error)})"
        raise file_error(path, problem, advice=advice) from error
    except (ValueError, RecursionError) as error:
        problem, place = _problem_and_place(error)
        raise file_error(path, problem, place=place, advice=advice) from error


def _problem_and_place(error: Exception) -> tuple[str, str]:
    """Split an error of msgspec, such as "Expected `int` - at `$.step`", into problem and place."""
    problem, _, place = str(error).partition(" - at ")
    return problem, place.replace("`", "").removeprefix("$.").replace("$", "the whole file")


def read_tensors(path: Path) -> Any:
    """Load what `torch.save` wrote, to the CPU: tensors and plain values only, never code."""
    import torch  # seconds, which only some commands need

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        # torch looks for the end of a truncated archive before its beginning
        is_damaged = error.errno == errno.EINVAL
        problem = "is damaged" if is_damaged else f"cannot be read ({error.strerror or error})"
        raise file_error(path, problem) from error
    except pickle.UnpicklingError as error:  # torch's text advises to run the code in it
        problem = "is damaged, or holds more than tensors and plain values (weights_only)"
        raise file_error(path, problem) from error
    except Exception as error:  # a damaged pickle or archive may raise any exception
        problem = f"is damaged, or was not written by torch.save ({error_summary(error)})"
        raise file_error(path, problem) from error


def write_tensors(path: Path, content: Any) -> None:
    """Write what `read_tensors` reads. After a full disk or a crash the previous file is there.

    OSError, with the name of the file, if it cannot be written: torch itself tells of a full disk
    by a position that is not what it expected.
    """
    import torch

    draft = path.with_name(f".{path.name}.part")
    try:
        with draft.open("wb") as file:  # not the name: only a file of Python's says what was wrong
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except (OSError, RuntimeError) as error:
        cause = _os_error_in(error)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def _os_error_in(error: BaseException | None) -> OSError | None:
    """The error of the operating system that led to an error."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def write_atomically(path: Path, content: str) -> None:
    """Write a file so that after a full disk or a crash the previous one is still there."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
