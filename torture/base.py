# SPDX-License-Identifier: Apache-2.0
"""What odd inputs are made from, and what keeps commands from starting anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def prepare(base: str) -> None:
    """Whole files to spoil: a corpus, a run with checkpoints, AN4, archives, recordings."""
    import numpy as np
    import soundfile

    from oktopk.lab.report.report import report
    from oktopk.lab.tasks.speech.synthesis import synthesize_corpus
    from oktopk.lab.train.config import make_config
    from oktopk.lab.train.run import run_worker
    from oktopk.launch.ranks import SINGLE_RANK

    root = Path(base)
    root.mkdir(parents=True)
    with open(root / "prepare.log", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.environ["OMP_NUM_THREADS"] = "1"
        synthesize_corpus(root / "corpus", train=6, test=2, seed=3)
        size = {"hidden": 8, "layers": 1, "channels": 2, "batch": 1, "validate_batch": 2}
        every = {"checkpoint_every": 3, "log_every": 1, "probe_every": 2, "warmup_steps": 2}
        places = {"name": "tiny", "runs": str(root / "runs"), "data": str(root / "corpus")}
        config = make_config(**size, **every, **places, epochs=1, density=0.1)
        run_worker(config, SINGLE_RANK, False, [], report)
        for part in ("train", "test"):
            _an4(root, part)
        for ending, how in {"": "", ".gz": "z", ".xz": "J", ".bz2": "j"}.items():
            path = f"an4.tar{ending}"
            subprocess.run(["tar", f"-c{how}f", path, "an4"], cwd=root, check=True)
        samples = (np.sin(np.arange(4000) / 9) * 9000).astype(np.int16)
        for ending, kind in {"wav": "WAV", "flac": "FLAC", "sph": "NIST"}.items():
            soundfile.write(root / f"one.{ending}", samples, 16_000, "PCM_16", format=kind)
        (root / "one.raw").write_bytes(samples.astype(">i2").tobytes())
        (root / "hosts").write_text("node1\nnode1\nnode2\nnode3\n")
        (root / "ready").touch()


def _an4(root: Path, part: str) -> None:
    """The recordings of the corpus as CMU would give them."""
    import soundfile

    etc, wav = root / "an4" / "etc", root / "an4" / "wav" / part
    etc.mkdir(parents=True, exist_ok=True)
    wav.mkdir(parents=True)
    names, texts = [], []
    own = root / "corpus"
    for path in sorted(own.rglob("*.wav"))[: 2 if part == "train" else None][-2:]:
        samples = soundfile.read(path, dtype="int16")[0]
        name = f"an{len(names)}-{part}-b"
        (wav / f"{name}.raw").write_bytes(samples.astype(">i2").tobytes())
        names.append(f"{part}/{name}\n")
        texts.append(f"<s> YES </s> ({name})\n")
    (etc / f"an4_{part}.fileids").write_text("".join(names))
    (etc / f"an4_{part}.transcription").write_text("".join(texts))


def stub() -> None:
    """Nothing that a command would start is started: only what it reads is tried."""
    import oktopk.lab.bench.bench
    import oktopk.lab.check
    import oktopk.lab.compare.compare
    import oktopk.lab.sweep.sweep
    import oktopk.lab.tasks.speech.an4
    import oktopk.lab.train.run

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    def over(*_: Any, **__: Any) -> Any:
        sys.exit(0)

    for module in (oktopk.lab.train.run, oktopk.lab.check, oktopk.lab.bench.bench):
        module.run_local_workers = nothing  # type: ignore[attr-defined]
    oktopk.lab.check.job_process_group = oktopk.lab.bench.bench.job_process_group = over
    oktopk.launch.network.run_workers_in_network = nothing  # type: ignore[assignment]
    oktopk.lab.train.run.run_worker = oktopk.lab.train.run.prepare_data = nothing
    oktopk.lab.compare.compare.compare = oktopk.lab.sweep.sweep.sweep = nothing
    oktopk.lab.tasks.speech.an4.synthesize_corpus = over
