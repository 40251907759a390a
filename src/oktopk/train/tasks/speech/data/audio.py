# SPDX-License-Identifier: Apache-2.0
"""One recording as 16 kHz mono samples in [-1, 1), and checks of its file.

libsndfile reads WAV, FLAC and NIST sphere. It accepts a file that ends early, so the size in the
header is compared with the file first.
"""

from __future__ import annotations

import re
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from oktopk.train.tasks.speech.data.problems import DataError, extra
from oktopk.utils.files import is_file, single_line

RATE = 16_000
FULL_SCALE = 32_768
SILENCE = 2 / FULL_SCALE  # a recording is silent if no sample is further from the mean
SHORTEST = 320  # samples in one window of the spectrogram
LONGEST = 3600 * RATE  # samples of all channels, which are decoded at once
BYTE_ORDERS = {"big": ">i2", "little": "<i2"}


def duration(path: Path) -> float:
    """Seconds of a recording. Reads only the header, and raises if it shows a problem."""
    return _header(path).frames / RATE


def read_audio(path: Path) -> np.ndarray:
    """Samples as float32 in [-1, 1); several channels are averaged."""
    info = _header(path)
    sound = extra("soundfile")
    try:
        samples, _ = sound.read(path, dtype="float32", always_2d=True)
    except (sound.SoundFileError, RuntimeError, ValueError, MemoryError) as error:
        raise DataError([f"{path} cannot be decoded ({error}): copy it again"]) from error
    if len(samples) < info.frames:
        message = f"{path} is truncated: {len(samples)} of {info.frames} samples; copy it again"
        raise DataError([message])
    return samples.mean(axis=1)


def read_raw(path: Path, byte_order: str) -> np.ndarray:
    """Samples of a headerless 16-bit file as float32 in [-1, 1)."""
    if is_file(path) and path.stat().st_size > 2 * LONGEST:
        raise DataError([f"{path} has more than {LONGEST} samples: cut it into utterances"])
    data = path.read_bytes() if is_file(path) else None
    if problem := _size_problem(path, data):
        raise DataError([problem])
    return np.frombuffer(data or b"", BYTE_ORDERS[byte_order]).astype(np.float32) / FULL_SCALE


def silent(samples: np.ndarray) -> bool:
    """Whether nothing was recorded. A constant offset counts as silence."""
    return bool(np.abs(samples - samples.mean()).max() <= SILENCE)


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write 16-bit PCM. Samples that were read from 16 bits are written unchanged."""
    whole = np.clip(np.rint(samples * FULL_SCALE), -FULL_SCALE, FULL_SCALE - 1)
    with wave.open(str(path), "wb") as file:  # soundfile would wait for the disk each time
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(whole.astype("<i2").tobytes())


def byte_order(paths: Iterable[Path]) -> str:
    """The byte order of headerless 16-bit speech, detected from several files.

    Neighbouring samples of speech are similar; with swapped bytes they look random. So the right
    order is the one whose differences have less energy relative to the samples.
    """
    paths = list(paths)
    roughness = {name: _roughness(paths, kind) for name, kind in BYTE_ORDERS.items()}
    best = min(roughness, key=lambda name: roughness[name])
    if not 1.5 * roughness[best] < max(roughness.values()):
        message = (
            f"{paths[0] if paths else 'raw files'}: neither byte order looks like 16-bit speech "
            f"(roughness {roughness['big']:.2f} and {roughness['little']:.2f}, looked at "
            f"{len(paths)} files): the files must be 16 kHz 16-bit PCM without header"
        )
        raise DataError([message])
    return best


def _roughness(paths: list[Path], kind: str) -> float:
    ratios = []
    for path in paths:
        data = path.read_bytes()
        samples = np.frombuffer(data[: len(data) & ~1], kind).astype(np.float64)
        samples = samples - samples.mean() if len(samples) else samples
        if energy := float(np.square(samples).sum()):
            ratios.append(float(np.square(np.diff(samples)).sum()) / energy)
    return float(np.median(ratios)) if ratios else 0.0


def _header(path: Path) -> Any:
    if not is_file(path):
        raise DataError([f"{single_line(path)} is missing"])
    if path.stat().st_size == 0:
        raise DataError([f"{path} is empty: copy it again"])
    if path.suffix == ".raw":
        raise DataError([f"{path} has no header: `oktopk data an4` makes WAV files of raw ones"])
    sound = extra("soundfile")
    try:
        info = sound.info(path)
    except (sound.SoundFileError, RuntimeError, ValueError) as error:
        raise DataError([f"{path} is not a WAV, FLAC or sphere file ({error})"]) from error
    promised, size = _promised_bytes(path), path.stat().st_size
    if promised > size:
        raise DataError([f"{path} is truncated: {size} of {promised} bytes; copy it again"])
    if info.samplerate != RATE:
        message = f"{path} has {info.samplerate} samples per second: resample it to {RATE}"
        raise DataError([message])
    if info.frames * info.channels > LONGEST:
        message = f"{path} has {info.frames} samples, more than an hour: cut it into utterances"
        raise DataError([message])
    if info.frames < SHORTEST:
        message = f"{path} has {info.frames} samples: at least {SHORTEST} make one spectrum"
        raise DataError([message])
    return info


def _size_problem(path: Path, data: bytes | None) -> str | None:
    if data is None:
        return f"{path} is missing"
    if not data:
        return f"{path} is empty: copy it again"
    if len(data) % 2:
        return f"{path} is truncated: {len(data)} bytes are no whole number of 16-bit samples"
    if len(data) < 2 * SHORTEST:
        return f"{path} has {len(data) // 2} samples: at least {SHORTEST} make one spectrum"
    return None


def _promised_bytes(path: Path) -> int:
    """The file size according to the header; 0 if the header does not say."""
    with path.open("rb") as file:
        start = file.read(12)
        if start[:4] == b"RIFF" and start[8:] == b"WAVE":
            while len(chunk := file.read(8)) == 8:
                length = int.from_bytes(chunk[4:], "little")
                if chunk[:4] == b"data":
                    # programs that do not know the length yet write 2^32 - 1 or 0
                    return 0 if length in (0, 2**32 - 1) else file.tell() + length
                file.seek(length + length % 2, 1)
        elif start[:7] == b"NIST_1A":
            return _sphere_bytes(start + file.read(4096))
    return 0


def _sphere_bytes(start: bytes) -> int:
    """Header plus samples of a NIST sphere file: lines of `name -type value` up to `end_head`."""
    lines = start.split(b"end_head")[0].decode("ascii", "replace").splitlines()
    fields = {"channel_count": "1"}
    fields |= {words[0]: words[2] for line in lines[2:] if len(words := line.split(None, 2)) == 3}
    names = ("sample_count", "sample_n_bytes", "channel_count")
    sizes = [fields.get(name, "?").strip() for name in names]
    sizes += [line.strip() for line in lines[1:2]]  # of the header itself
    if len(sizes) < 4 or not all(re.fullmatch("[0-9]{1,12}", size) for size in sizes):
        return 0
    count, width, channels, header = map(int, sizes)
    return header + count * width * channels
