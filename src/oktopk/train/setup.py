"""Set up a run: the corpus, the model in DDP with oktopk attached, the optimizer."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import oktopk
from oktopk.adapters.ddp.handle import Handle
from oktopk.comm.communicator import Comm
from oktopk.errors import RunError
from oktopk.launch.rank_environment import RankEnvironment
from oktopk.runlog.aggregates import RunTotals
from oktopk.runlog.schema import ProbeRecord
from oktopk.train.all_or_raise import all_or_raise, check_same_data
from oktopk.train.config import Config
from oktopk.train.data.features import Spectra, open_spectra
from oktopk.train.data.manifest import (
    Utterance,
    check,
    find_manifests,
    read_manifest,
)
from oktopk.train.data.synthesis import synthesize_corpus
from oktopk.train.models.lstman4 import Lstman4
from oktopk.train.preset_options import parse_overrides, preset_options
from oktopk.train.probe import Probe

log = logging.getLogger("oktopk")

DATA = Path("data")
# Each rank keeps the batch-norm statistics of its own batches, and validation averages them.
# torch 2.13 renamed the argument.
_NAMES = signature(DistributedDataParallel.__init__).parameters
_OWN = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"
OWN_BUFFERS: dict[str, Any] = {_OWN: False}


@dataclass(slots=True)
class Progress:
    """How far a run is. Together with the seed it determines the next batches."""

    epoch: int = 0
    index: int = 0
    """Steps finished in this epoch."""

    step: int = 0
    """Steps finished in the whole run."""

    loss_sum: float = 0.0
    """This rank's losses in this epoch, summed over `loss_count` backward passes."""

    loss_count: int = 0


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and test utterances, shortest first, and their spectrograms."""

    train: list[Utterance]
    test: list[Utterance]
    train_spectra: Spectra
    test_spectra: Spectra

    def fingerprint(self) -> str:
        """A hash of names, transcripts and durations; it does not depend on the folder."""
        lines = [f"{u.audio.name}\t{u.text}\t{u.seconds}\n" for u in (*self.train, *self.test)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(slots=True)
class Run:
    """The state of a training run on one rank."""

    config: Config
    comm: Comm
    device: torch.device
    env: RankEnvironment
    corpus: Corpus
    model: Lstman4
    ddp: DistributedDataParallel
    optimizer: Optimizer
    handle: Handle
    steps_per_epoch: int
    planned_steps: int
    """Steps of all epochs, which the learning rate schedule is made for."""

    total_steps: int
    """Steps until the run ends: `max_steps` may end it earlier."""

    progress: Progress = field(default_factory=Progress)
    totals: RunTotals = field(default_factory=RunTotals)
    skipped_in_a_row: int = 0
    probe: Probe | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings that were changed when the run was resumed: old and new value."""

    probed: ProbeRecord | None = None
    """What the probe measured in the last step; None if the step was not probed."""


def synthetic_corpus(config: Config) -> Path:
    """The folder of the synthesized corpus, which later runs use again."""
    return DATA / f"spoken-{config.spoken_train}-{config.spoken_test}"


def prepare_corpus(
    config: Config, comm: Comm, device: torch.device, env: RankEnvironment
) -> Corpus:
    """Synthesize a corpus if there is none, check it, compute spectrograms; once per machine."""
    folder = Path(config.data) if config.data else synthetic_corpus(config)
    cache = Path(config.cache) if config.cache else folder / "cache"

    def first() -> Corpus | None:
        if env.local_rank != 0:
            return None
        if not config.data and not folder.exists():
            log.info("synthesizing a corpus in %s", folder)
            _synthesize(folder, config)
        corpus = _open(folder, cache)
        check(corpus.train, corpus.test)
        return corpus

    ready = all_or_raise(comm, device, "preparing the data", first)
    corpus = all_or_raise(comm, device, "reading the data", lambda: ready or _open(folder, cache))
    check_same_data(comm, device, str(folder), corpus.fingerprint())
    return corpus


def _synthesize(folder: Path, config: Config) -> None:
    """Synthesize in a temporary folder and rename it: other machines may do so at the same time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
        corpus = Path(draft) / folder.name
        synthesize_corpus(corpus, train=config.spoken_train, test=config.spoken_test)
        try:
            corpus.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def _open(folder: Path, cache: Path) -> Corpus:
    train, test = (read_manifest(path) for path in find_manifests(folder))
    return Corpus(train, test, open_spectra(train, cache), open_spectra(test, cache))


def make_optimizer(config: Config, model: torch.nn.Module) -> Optimizer:
    """SGD with momentum as in the original code, or AdamW."""
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return AdamW(model.parameters(), **common)
    return SGD(model.parameters(), momentum=config.momentum, **common)


def log_unused_options(config: Config) -> None:
    """Log the preset options that have no effect, because `dense` has no residuals."""
    overrides = parse_overrides(config.overrides)
    if config.method == "dense" and overrides:
        log.info("%s: without effect, since dense sends everything", ", ".join(overrides))


def exchange_options(config: Config) -> dict[str, Any]:
    """The arguments of `attach` that the config decides."""
    same_names = ("method", "density", "wire", "warmup_steps", "ramp_steps", "exact_every")
    same_names += ("bounds_every", "scope", "timeout")
    options = {name: getattr(config, name) for name in same_names}
    return (
        options
        | preset_options(config.preset, config.overrides)
        | {"clip_before": config.clip_before or None}
    )


def make_probe(config: Config, model: Lstman4, handle: Handle, comm: Comm) -> Probe | None:
    """The probe, if the config has one."""
    if not config.probe_every:
        return None
    return Probe(config.probe_every, dict(model.named_parameters()), handle, comm)


def set_up(config: Config, comm: Comm, device: torch.device, env: RankEnvironment) -> Run:
    """Set up everything. DDP gives every rank the weights of rank 0."""
    corpus = prepare_corpus(config, comm, device, env)
    per_step = config.batch * comm.size * config.accumulate
    steps_per_epoch = len(corpus.train) // per_step
    if steps_per_epoch == 0:
        raise RunError(
            f"{len(corpus.train)} training utterances do not fill one step of {comm.size} workers "
            f"x batch {config.batch} x accumulate {config.accumulate} = {per_step}: lower batch, "
            "accumulate or workers"
        )
    planned = config.epochs * steps_per_epoch
    total = min(planned, config.max_steps) if config.max_steps else planned
    torch.manual_seed(config.seed)
    model = Lstman4(
        hidden=config.hidden,
        layers=config.layers,
        bidirectional=config.bidirectional,
        channels=config.channels,
    ).to(device)
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **OWN_BUFFERS,
    )
    optimizer = make_optimizer(config, model)
    log_unused_options(config)
    handle = oktopk.attach(
        ddp,
        optimizer=optimizer,
        total_steps=total if comm.rank == 0 else None,
        **exchange_options(config),
    )
    return Run(
        config=config,
        comm=comm,
        device=device,
        env=env,
        corpus=corpus,
        model=model,
        ddp=ddp,
        optimizer=optimizer,
        handle=handle,
        steps_per_epoch=steps_per_epoch,
        planned_steps=planned,
        total_steps=total,
        probe=make_probe(config, model, handle, comm),
    )
