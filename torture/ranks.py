# SPDX-License-Identifier: Apache-2.0
"""A rank that trains a small model by `attach` or `local_steps`, and errs where it is told to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it when the first model is wrapped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.launch.ranks import RankEnvironment
from oktopk.launch.rendezvous import job_process_group

CLASSES, WIDTH, FEATURES = 5, 48, 20
SAVE_EVERY = 3
PLACES = ("join", "attach", "forward", "backward", "on_step", "optimizer", "save", "leave")
"""Where a rank can be told to fail, in the order in which a run comes by."""


@dataclass(frozen=True, slots=True)
class Plant:
    """What goes wrong on a rank: an act at a place of a step, or `after` seconds of training."""

    act: str
    place: str = ""
    step: int = 0
    after: float = 0.0
    number: int = 0
    """Of the signal, for the act `signal`; bytes for `disk`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's part of a run."""

    rank: int
    size: int
    folder: str
    address: tuple[str, int]
    """Of the store; it lives in the process that started the ranks."""

    attached: dict[str, Any]
    """Arguments of `attach`, or of `local_steps` where `every` is one of them."""

    steps: int = 12
    without: int = -1
    """A batch that is left out."""

    resume_from: int = 0
    loads: int = 0
    """World size of the run that is resumed, if it is another."""

    timeout: float = 6.0
    dtype: str = "float32"
    layers: int = 3
    attaches: bool = True
    init_sync: bool = True
    """Whether DDP compares the models and sends that of rank 0."""

    plants: tuple[Plant, ...] = ()
    device: str = "lo"
    extra: dict[str, Any] = field(default_factory=dict)


class PlantedError(RuntimeError):
    """What a rank raises that was told to."""


class Planted:
    """Carries out the plants of this rank when the run comes by their place."""

    def __init__(self, job: Job) -> None:
        self._job, self.step = job, 0
        self.handle: Any = None
        self.model: Any = None
        self.loaded: dict[str, Tensor] = {}
        self.moves = 0
        """Begins and ends of updates of the weights: odd inside of one."""

    def at(self, place: str) -> None:
        for plant in self._job.plants:
            if plant.place == place and plant.step == self.step:
                self._act(plant)

    def start_clocks(self) -> None:
        for plant in self._job.plants:
            if plant.after:
                timer = threading.Timer(plant.after, self._act, [plant])
                timer.daemon = True
                timer.start()

    def _act(self, plant: Plant) -> None:
        note(self._job, "planted", {"act": plant.act, "place": plant.place, "step": self.step})
        if plant.act == "signal":
            os.kill(os.getpid(), plant.number)
            if plant.number == signal.SIGINT:
                time.sleep(0)  # the interpreter raises KeyboardInterrupt here
        elif plant.act == "raise":
            raise PlantedError(f"planted in {plant.place} of step {self.step}")
        elif plant.act == "exit":
            sys.exit(7)
        elif plant.act == "late":
            time.sleep(plant.after or 1.5)
        else:
            self._quietly(plant.act, plant.number)

    def _quietly(self, act: str, number: int) -> None:
        """What does not stop this rank at once."""
        if act == "weights":
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[number].add_(1e-3)
        elif act == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
        elif act == "state":
            self.take_state()
        elif act == "damage":
            damage_messages(self.handle.comm.transport)
        elif act == "load":
            self.load_others(number)

    def poison(self, loss: Tensor) -> Tensor:
        """The loss, with the NaN or Inf of this step, if one is planted."""
        for plant in self._job.plants:
            if plant.act in ("nan", "inf") and plant.step == self.step:
                return loss * float(plant.act)
        return loss

    def take_state(self) -> None:
        """A state at an odd moment; refusing it is an answer too."""
        moves = self.moves
        try:
            state = self.handle.state_dict()
            found = {"at": exchanges(state), "state": owed(state)}
            if moves == self.moves and moves % 2 == 0 and state.get("local_steps") == 0:
                found["torn"] = digest(state["weights"]) != digest(state["anchor"])
        except Exception as error:  # noqa: BLE001 - judged by the type and the message
            found = {"refused": f"{type(error).__name__}: {error}"}
        note(self._job, "odd", found)

    def load_others(self, seed: int) -> None:
        """Load other weights into the model, as somebody who goes on from a checkpoint."""
        torch.manual_seed(seed)
        weights = self.model.state_dict()
        self.loaded = {name: torch.randn_like(x) / 7 for name, x in weights.items()}
        self.model.load_state_dict(self.loaded)

    def distance_to_loaded(self) -> float:
        """How far the weights are from those that were loaded."""
        named = self.model.state_dict().items()
        return sum(float((x - self.loaded[name]).square().sum()) for name, x in named) ** 0.5

    def watch(self, optimizer: Any) -> None:
        """Note when an optimizer moves the weights. Before `local_steps` adds a hook of its own."""

        def move(*_: Any) -> None:
            self.moves += 1

        optimizer.register_step_pre_hook(move)
        optimizer.register_step_post_hook(move)


def damage_messages(transport: Any) -> None:
    """Let this rank send words of ones instead of entries from now on, in messages of any length
    that those have: no codec can read that."""
    whole = transport.exchange

    def damaged(outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        spoilt = {
            peer: torch.full_like(x, -1) if x.numel() > 4 else x for peer, x in outgoing.items()
        }
        whole(spoilt, incoming)

    transport.exchange = damaged


def note(job: Job, name: str, entry: dict[str, Any]) -> None:
    """A line for whoever started this rank."""
    with open(f"{job.folder}/rank-{job.rank}.{name}", "a") as file:
        file.write(json.dumps(entry) + "\n")


def digest(value: Any) -> str:
    """The bits of a value: tensors, and everything else as it is written."""
    sha = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            sha.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key, inner in part.items():
                sha.update(str(key).encode())
                add(inner)
        else:
            sha.update(str(part).encode())

    add(value)
    return sha.hexdigest()[:16]


def owed(state: dict[str, Any]) -> str:
    """The bits of a handle's state that a step changes at its end.

    Not the layout of the buckets: a step takes on DDP's at its beginning, and a run that is resumed
    from either gives the same bits.
    """
    names = ("residuals", "arrived", "anchor", "momentum")
    return digest({name: state[name] for name in names if name in state})


def exchanges(state: dict[str, Any]) -> int:
    """How many exchanges a handle had finished when its state was taken."""
    return json.loads(state["metadata"])["engine"]["step"]


def build(job: Job) -> nn.Module:
    torch.manual_seed(0)
    inner = [nn.Linear(WIDTH, WIDTH) for _ in range(job.layers)]
    layers = [nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), *inner, nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).to(
        getattr(torch, job.dtype)
    )


def batch(job: Job, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * job.rank + step)
    x = torch.randn(8, FEATURES, generator=g)
    return x.to(getattr(torch, job.dtype)), x[:, :CLASSES].argmax(1)


def main(job: Job) -> None:
    """A whole run, in a forked process; all that it says is in a file."""
    with open(f"{job.folder}/rank-{job.rank}.log", "w", buffering=1) as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = job.device
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = job.address[0], str(job.address[1])
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        planted = Planted(job)
        planted.at("join")
        local = (job.rank, job.size) if job.device == "lo" else (0, 1)
        with job_process_group(
            RankEnvironment("torchrun", job.rank, job.size, *local), job.timeout
        ):
            train(job, planted)
        planted.step = 0
        planted.at("leave")
        note(job, "end", {"ok": True})


def train(job: Job, planted: Planted) -> None:
    """The steps as a user would write them, with a checkpoint of every third."""
    model = build(job)
    is_local = "every" in job.attached
    ddp: Any = model
    if not is_local:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, init_sync=job.init_sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    planted.model = model
    planted.watch(optimizer)
    planted.at("attach")
    handle = None
    if job.attaches:
        if is_local:
            handle = oktopk.local_steps(model, optimizer, timeout=job.timeout, **job.attached)
        else:
            handle = oktopk.attach(ddp, timeout=job.timeout, **job.attached)
        handle.on_step = lambda stats: planted.at("on_step")
        planted.handle = handle
    hooked = [p for p in model.parameters() if p.ndim == 2][1]
    hooked.register_hook(lambda grad: planted.at("backward"))
    if handle is not None and job.resume_from:
        load(job, model, optimizer, handle)
    planted.start_clocks()
    with _states_taken(job, planted):
        for step in range(job.resume_from, job.steps + job.extra.get("more", 0)):
            if step != job.without:
                planted.step = step
                one_step(job, planted, ddp, optimizer, step)
                after_step(job, planted, optimizer, step)
    if job.extra.get("finishes"):
        handle.finish()
        note(job, "steps", {"step": -1, "weights": digest(dict(model.named_parameters()))})
    if handle is not None:
        handle.close()


def one_step(job: Job, planted: Planted, ddp: Any, optimizer: Any, step: int) -> None:
    time.sleep(job.extra.get("pause", 0.0))
    optimizer.zero_grad()
    x, y = batch(job, step)
    planted.at("forward")
    planted.poison(cross_entropy(ddp(x), y)).backward()
    planted.at("optimizer")
    is_local = "every" in job.attached  # there a skipped exchange is no skipped step
    stats = planted.handle.stats if planted.handle is not None else None
    if is_local or stats is None or not stats.skipped:
        optimizer.step()


def after_step(job: Job, planted: Planted, optimizer: Any, step: int) -> None:
    """Write down the bits, and every few steps a checkpoint, whole or not at all."""
    weights = dict(planted.model.named_parameters())
    entry: dict[str, Any] = {"step": step, "weights": digest(weights)}
    if planted.loaded:
        entry["far"] = planted.distance_to_loaded()
    if planted.handle is not None:
        entry["skipped"] = planted.handle.skipped_steps
        if job.extra.get("states"):
            state = planted.handle.state_dict()
            entry |= {"at": exchanges(state), "state": owed(state)}
    note(job, "steps", entry)
    if planted.handle is not None and (step + 1) % SAVE_EVERY == 0:
        states = planted.model.state_dict(), optimizer.state_dict(), planted.handle.state_dict()
        path = Path(job.folder, f"step-{step + 1}-rank-{job.rank}.pt")
        torch.save(dict(zip(("model", "optimizer", "handle"), states, strict=True)), f"{path}.part")
        planted.at("save")
        os.replace(f"{path}.part", path)


def load(job: Job, model: nn.Module, optimizer: Any, handle: Any) -> None:
    ranks = range(job.loads) if job.loads else [job.rank]
    paths = [f"{job.folder}/step-{job.resume_from}-rank-{rank}.pt" for rank in ranks]
    saved = [torch.load(path, weights_only=True) for path in paths]
    model.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    states = [each["handle"] for each in saved]
    handle.load_state_dict(states if job.loads else states[0])
    # a run that was killed after its last step has none left to take
    weights = digest(dict(model.named_parameters()))
    note(job, "steps", {"step": job.resume_from - 1, "weights": weights})
    if job.loads:
        torch.save(handle.state_dict()["residuals"], f"{job.folder}/taken-over-{job.rank}.pt")


@contextlib.contextmanager
def _states_taken(job: Job, planted: Planted) -> Any:
    """States from another thread all the time, where that is planted."""
    over = threading.Event()

    def take() -> None:
        while not over.wait(0.003):
            planted.take_state()

    asked = any(plant.act == "states from a thread" for plant in job.plants)
    thread = threading.Thread(target=take, daemon=True)
    if asked:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if asked:
            thread.join(5)
