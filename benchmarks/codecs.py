# SPDX-License-Identifier: Apache-2.0
"""What every codec costs and loses on gradients of real training, and what training makes of it.

    python benchmarks/codecs.py               # bits, energy and milliseconds, in about two minutes
    python benchmarks/codecs.py --accuracy    # the final loss with every codec, three seeds

A GPT and a GRU read the source of Python's standard library. Four ranks in one process train each
with AdamW at 2 % and error feedback, and exchange exactly. The selections of one rank (`local`) and
the sums that are kept (`result`) are what codecs see; they are taken at three steps. The floor of
positions is the entropy of indices that lie evenly. Indices in clusters can take less.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent / "convergence"))
from tasks import TASKS, Reader, Task, rate_schedule

import oktopk
from oktopk.comm.communicator import Comm
from oktopk.methods.selection import top_k
from oktopk.sparse import Sparse
from oktopk.wire import codec
from oktopk.wire.codec import CODECS, CodecName, EntryRange

DENSITY, RANKS, WARMUP, TAKEN_AT, MILLION = 0.02, 4, 20, (30, 75, 150), 1_000_000
FLOOR = -(math.log2(DENSITY) + (1 / DENSITY - 1) * math.log2(1 - DENSITY))


class GPT(nn.Module):
    """Three layers of width 128 that predict the next character."""

    def __init__(self, characters: int = 128, width: int = 128, length: int = 48) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(characters, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.embed(x) + self.position.weight[: x.shape[1]]
        return self.head(self.layers(hidden, mask=mask, is_causal=True)).transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT": GPT, "GRU": partial(Reader, hidden=384)}


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The flat gradient of one rank's batch."""
    grads = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


def apply_(model: nn.Module, optimizer: torch.optim.Optimizer, average: Tensor) -> None:
    """Take one step of the optimizer with a flat gradient."""
    parameters = list(model.parameters())
    parts = average.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).clone()
    optimizer.step()


def selections(network: Callable[[], nn.Module], task: Task) -> dict[str, list[Sparse]]:
    """What ranks select, and what they keep of the sums, in a training with error feedback."""
    torch.manual_seed(0)
    model, generator = network(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    numel = sum(p.numel() for p in model.parameters())
    residual, k = torch.zeros(RANKS, numel), round(DENSITY * numel)
    taken: dict[str, list[Sparse]] = {"local": [], "result": []}
    for step in range(max(TAKEN_AT) + 1):
        x, y = task.batch(generator, 8 * RANKS)
        grads = [gradient(model, x[rank::RANKS], y[rank::RANKS]) for rank in range(RANKS)]
        acc = residual + torch.stack(grads)
        if step < WARMUP:
            apply_(model, optimizer, acc.mean(0))
            continue
        local = [top_k(row, k)[0] for row in acc]
        sent = torch.stack([each.to_dense() for each in local])
        result = top_k(sent.sum(0), k)[0]
        if step in TAKEN_AT:
            taken["local"].append(local[0])
            taken["result"].append(result)
        dense = result.to_dense()
        residual = acc - sent * (dense != 0)
        apply_(model, optimizer, dense / RANKS)
    return taken


def encoded(entries: Sparse, name: CodecName) -> codec.Encoded:
    whole = EntryRange(entries.num, 0, entries.numel)
    return codec.encode(entries.indices, entries.values, whole, name)


def bits(entries: Sparse, name: CodecName) -> float:
    return 32 * encoded(entries, name).words.numel() / entries.num


def energy_lost(entries: Sparse, name: CodecName) -> float:
    """The share of the squares that rounding leaves to the residual."""
    lost = entries.values - encoded(entries, name).values
    return float(lost.square().sum() / entries.values.square().sum())


def a_million(some: list[Sparse]) -> Sparse:
    """Selections one after the other, again and again, until there are a million entries."""
    repeats = -(-MILLION // sum(each.num for each in some))
    indices, values, start = [], [], 0
    for each in some * repeats:
        indices.append(each.indices + start)
        values.append(each.values)
        start += each.numel
    return Sparse(torch.cat(indices)[:MILLION], torch.cat(values)[:MILLION], start)


def milliseconds(run: Callable[[], object]) -> float:
    run()  # compiles, and touches the memory
    taken = []
    for _ in range(25):
        start = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - start))
    return min(taken)


def costs(entries: Sparse, name: CodecName) -> tuple[float, float]:
    """Milliseconds to encode a million entries and to decode them, on one core."""
    words, _, told = encoded(entries, name)
    indices, values = torch.empty_like(entries.indices), torch.empty_like(entries.values)
    encode = milliseconds(lambda: encoded(entries, name))
    return encode, milliseconds(lambda: codec.decode(words, told, name, indices, values))


def show_bits() -> None:
    task = TASKS["chars"]()
    taken = {name: selections(network, task) for name, network in MODELS.items()}
    columns = {
        f"{model} {kind}": some for model, kinds in taken.items() for kind, some in kinds.items()
    }
    print(f"floor of positions that lie evenly at {DENSITY:.0%}: {FLOOR:.2f} bits\n")
    title = "".join(f"{name:>20}" for name in columns)
    print(f"{'bits, energy lost':18}{title}{'encode':>10}{'decode':>8}")
    everything = a_million([each for some in columns.values() for each in some])
    for name in CODECS:
        row = f"{name:18}"
        for some in columns.values():
            mean_bits = statistics.mean(bits(each, name) for each in some)
            mean_lost = statistics.mean(energy_lost(each, name) for each in some)
            row += f"{mean_bits:12.2f}{mean_lost:8.2%}"
        encode, decode = costs(everything, name)
        print(f"{row}{encode:10.1f}{decode:8.1f}", flush=True)
    print("\nencode, decode: milliseconds for a million of these entries, one core")


def final_loss(comm: Comm, task: Task, wire: CodecName, seed: int, steps: int) -> float:
    """The loss on held-out text at the end of a training of one rank, through a `Reducer`."""
    torch.manual_seed(seed)
    model, generator = task.network(), torch.Generator().manual_seed(seed)
    optimizer = task.optimizers["adamw"](model.parameters())
    decay = rate_schedule(optimizer, steps)
    numel = sum(p.numel() for p in model.parameters())
    warmup = task.warmup_steps
    reducer = oktopk.Reducer(numel, density=DENSITY, warmup_steps=warmup, wire=wire, comm=comm)
    for _ in range(steps):
        x, y = task.batch(generator, task.size)
        grad = gradient(model, x[comm.rank :: comm.size], y[comm.rank :: comm.size])
        reducer.reduce_(grad)
        apply_(model, optimizer, grad)
        decay.step()
    x, y = task.test()
    with torch.no_grad():
        return task.metric(model(x), y)


def show_accuracy(seeds: list[int], steps: int) -> None:
    task = TASKS["chars"]()
    print(f"characters, AdamW, {RANKS} ranks, {DENSITY:.0%}, {steps} steps: nats per character")
    for name in CODECS:
        losses = [
            oktopk.simulate(
                RANKS, partial(final_loss, task=task, wire=name, seed=seed, steps=steps)
            )
            for seed in seeds
        ]
        found = [ranks[0] for ranks in losses]
        each = "".join(f"{loss:9.4f}" for loss in found)
        print(f"{name:8}{statistics.mean(found):9.4f}  ({each.strip()})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits, energy and cost of every codec.")
    parser.add_argument("--accuracy", action="store_true", help="train with every codec instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.accuracy:
        show_accuracy(args.seeds, args.steps)
    else:
        show_bits()


if __name__ == "__main__":
    main()
