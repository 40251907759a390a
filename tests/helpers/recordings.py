# SPDX-License-Identifier: Apache-2.0
"""Small recordings and corpora for the tests: voices that are sums of slow waves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000


def tone(seconds: float = 1.0, seed: int = 0) -> np.ndarray:
    """16-bit samples whose neighbours are alike, as in speech."""
    chance = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    waves = sum(np.sin(2 * np.pi * f * time + f) for f in chance.uniform(100, 900, 4))
    return np.round(3000 * waves + chance.normal(0, 20, len(time))).astype(np.int16)


def sphere(samples: np.ndarray, order: str = "10", count: int | None = None) -> bytes:
    """A NIST sphere file as AN4's: a text header of 1024 bytes, then the samples."""
    fields = [
        "database_id -s3 AN4",
        f"sample_count -i {len(samples) if count is None else count}",
        "sample_n_bytes -i 2",
        "channel_count -i 1",
        f"sample_byte_format -s2 {order}",
        f"sample_rate -i {RATE}",
        "sample_coding -s3 pcm",
        "end_head\n",
    ]
    header = "\n".join(["NIST_1A", "   1024", *fields]).encode().ljust(1024)
    return header + samples.astype(">i2" if order == "10" else "<i2").tobytes()


def save(path: Path, samples: np.ndarray, kind: str) -> Path:
    """Write samples next to `path` as one of the kinds AN4 comes in, and return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(f"{path.name}.{'raw' if 'endian' in kind else kind}")
    if kind == "sph":
        path.write_bytes(sphere(samples))
    elif "endian" in kind:
        path.write_bytes(samples.astype(">i2" if kind == "big-endian" else "<i2").tobytes())
    else:
        soundfile.write(path, samples, RATE)
    return path


TRAIN = {"an1-fash-b": "GO", "an2-fash-b": "U M N SIX", "cen3-mabc-b": "MAY FIRST"}
TEST = {"an4-fcaw-b": "RUBOUT G M"}
SECONDS = {"an1-fash-b": 0.8, "an2-fash-b": 2.0, "cen3-mabc-b": 1.5, "an4-fcaw-b": 1.2}


def an4_like(root: Path, kind: str = "big-endian") -> Path:
    """A folder as CMU gives AN4, with four utterances."""
    (root / "etc").mkdir(parents=True)
    for part, texts in (("train", TRAIN), ("test", TEST)):
        folder = "an4_clstk" if part == "train" else "an4test_clstk"
        names = [f"{folder}/{stem.split('-')[1]}/{stem}" for stem in texts]
        marks = ("<s> ", " </s>") if part == "train" else ("", "")  # as in the real lists
        lines = [f"{marks[0]}{text}{marks[1]} ({stem})" for stem, text in texts.items()]
        (root / "etc" / f"an4_{part}.fileids").write_text("\n".join(names) + "\n")
        (root / "etc" / f"an4_{part}.transcription").write_text("\n".join(lines) + "\n")
        for seed, name in enumerate(names):
            save(root / "wav" / name, tone(SECONDS[Path(name).name], seed), kind)
    return root
