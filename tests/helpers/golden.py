# SPDX-License-Identifier: Apache-2.0
"""The bits that training ends with, for every method: what a change of the code must not change.

    python tests/helpers/golden.py --record    # after a change that is meant to change them

`golden.json` holds digests of the weights after 40 steps and of a run's `metrics.jsonl` without its
clocks. Another CPU may add in another order, so the file also holds the digest of a training
without this library: where that differs, the others cannot be compared.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import Net, batch
from laws import WAYS

RECORDED = Path(__file__).with_suffix(".json")
STEPS = 40
SIZES = (1, 2, 3)
WIRES = ("fp32", "bf16")
PRESETS = ("none", "sgd", "adamw")
"""Optimizers that `attach` is told of; none is SGD that it is not told of."""

CLOCKS = {
    *("time", "seconds", "microseconds", "select", "exchange", "scatter", "exposed", "data"),
    *("forward", "backward", "optimizer", "whole", "memory", "versions", "machine"),
}
UNSTABLE = {"memory", "ranks"}
"""Kinds of records that have nothing but clocks and memory."""


def digest(tensors: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name, x in tensors.items():
        sha.update(name.encode())
        sha.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def optimizer_of(net: torch.nn.Module, preset: str):
    """An optimizer and a schedule with a falling rate."""
    if preset == "adamw":
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.7)


def without_oktopk() -> str:
    """What this CPU makes of a training that has no exchange."""
    torch.manual_seed(0)
    net = Net()
    optimizer, schedule = optimizer_of(net, "adamw")
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(0, step)
        cross_entropy(net(x), y).backward()
        optimizer.step()
        schedule.step()
    return digest(dict(net.named_parameters()))


def started(group, way: str, wire: str, preset: str):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.02)
    optimizer, schedule = optimizer_of(model.module, preset)
    told = {} if preset == "none" else {"optimizer": optimizer}
    handle = oktopk.attach(
        model,
        density=0.05,
        warmup_steps=6,
        wire=wire,
        exact_every=8,
        bounds_every=8,
        group_numel=2000,
        **WAYS[way],
        **told,
    )
    return model, optimizer, schedule, handle


def take_steps(group, parts, steps: range) -> str:
    model, optimizer, schedule, handle = parts
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(torch.distributed.get_rank(group), step)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    torch.distributed.barrier(group)
    handle.close()
    return digest(dict(model.module.named_parameters()))


def trained(group, wires=WIRES) -> dict[str, str]:
    """Digests of the weights for every method, wire format and preset."""
    return {
        f"{way} {wire} {preset}": take_steps(group, started(group, way, wire, preset), range(STEPS))
        for way in WAYS
        for wire in wires
        for preset in PRESETS
    }


def resumed(group) -> str:
    """The digest of a run that was stopped after 17 steps."""
    parts = started(group, "oktopk", "bf16", "adamw")
    take_steps(group, parts, range(17))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in parts], buffer)
    buffer.seek(0)
    again = started(group, "oktopk", "bf16", "adamw")
    for part, state in zip(again, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    return take_steps(group, again, range(17, STEPS))


def without_clocks(value):
    if isinstance(value, dict):
        return {key: without_clocks(inner) for key, inner in value.items() if key not in CLOCKS}
    return [without_clocks(inner) for inner in value] if isinstance(value, list) else value


def metrics_of(folder: Path | str) -> str:
    """The digest of what a run recorded, without clocks, memory and the machine."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    kept = [
        {key: record[key] for key in ("kind", "step", "total_steps", "tensors", "task")}
        if record["kind"] == "run"
        else without_clocks(record)
        for record in records
        if record["kind"] not in UNSTABLE
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def record() -> None:
    """Write what the code gives now."""
    import speech
    from oktopk.lab.tasks.speech.synthesis import synthesize_corpus
    from worlds import World

    found: dict = {"without oktopk": without_oktopk()}
    for P in SIZES:
        world = World(P)
        found[f"P = {P}"] = world.run(P, trained, timeout=300)[0]
        if P == 2:
            found["resumed"] = world.run(P, resumed)[0]
            with tempfile.TemporaryDirectory() as folder:
                synthesize_corpus(Path(folder, "spoken"), train=26, test=7, seed=3)
                args = f"{folder}/spoken", f"{folder}/runs", {"epochs": 2}, False
                found["metrics"] = metrics_of(world.run(P, speech.train, *args)[0][0])
        world.close()
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    assert sys.argv[1:] == ["--record"], "usage: python tests/helpers/golden.py --record"
    torch.set_num_threads(1)
    record()
