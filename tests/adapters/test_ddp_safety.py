# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank is seen by all: NaNs, drifting weights, misuse, ends of all kinds."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import IDIOMS, SPARSE, Net, batch, build, one_step, train, weights_of
from oktopk.adapters.driver import clip_
from oktopk.comm.consistency import BLOCK, checksum
from oktopk.settings import DENSITY


class Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))


ODD = {
    "complex": Complex,
    "sparse": lambda: torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True)),
}


def attach_badly(group, what: str) -> str:
    model = DistributedDataParallel(Net(), process_group=group)
    try:
        if what == "model":
            oktopk.attach(model.module)
        elif what in ODD:
            oktopk.attach(DistributedDataParallel(ODD[what](), process_group=group))
        else:
            oktopk.attach(model, **{what: -2.0})
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "attach needs a DistributedDataParallel model, got Net"),
        ("density", "density must be in (0, 1], got -2.0"),
        ("timeout", "timeout must be more than 0 seconds and at most 10000000, got -2.0"),
        ("clip_before", "clip_before must be more than 0, or None, got -2.0"),
        ("check_every", "check_every must be a whole number, got -2.0"),
        ("complex", "parameter 'turn' is torch.complex64: gradients must be real"),
        ("sparse", "parameter '0.weight' has sparse gradients: use Embedding(..., sparse=False)"),
    ],
)
def test_misuse_is_named(worlds, what, message):
    for said in worlds.run(2, attach_badly, what):
        assert message in said


def logged(group, total_steps: int) -> list[str]:
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("oktopk")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        train(group, "plain", 5, {"warmup_steps": 3, "total_steps": total_steps})
    finally:
        logger.removeHandler(handler)
    return lines


def test_the_log_tells_of_the_sparse_phase(worlds):
    first, other = worlds.run(2, logged, 5)
    assert len(first) == 2 and not other
    assert first[0].startswith("INFO method oktopk, world size 2, 8,405 gradients: 3 dense steps")
    assert first[1].startswith(f"INFO step 3: the sparse phase begins, oktopk at density {DENSITY}")
    first, other = worlds.run(2, logged, 3)
    assert first[0].startswith("WARNING the run has 3 steps and the warm-up 3")
    assert not any("WARNING" in line for line in other)


def nan_on_one_rank(group, on_nonfinite: str, when: int) -> tuple:
    """A NaN on rank 1 alone in step `when`, beside gradients that would wipe what is owed."""
    rank, skipped = torch.distributed.get_rank(group), []
    attached = {**SPARSE, "on_nonfinite": on_nonfinite, "on_step": skipped.append}
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    told, seen = [], None
    for step in range(9):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        owed = {name: part.clone() for name, part in handle.residuals.items()}
        loss = cross_entropy(called(x), y)
        if step == when:
            loss = loss * (float("nan") if rank == 1 else 1e20)
        try:
            loss.backward()
        except RuntimeError as error:
            told.append(str(error))
        if step == when:
            grads = torch.cat([p.grad.view(-1) for p in model.parameters()])
            now = handle.residuals
            kept = all(torch.equal(part, now[name]) for name, part in owed.items())
            seen = (bool(grads.isnan().all()), bool(grads.any()), kept, len(owed))
        else:
            optimizer.step()
    handle.close()
    return weights_of(model), [s.skipped for s in skipped], handle.skipped_steps, told, seen


@pytest.mark.parametrize("when", [1, 6], ids=["dense phase", "sparse phase"])
@pytest.mark.parametrize("policy", ["skip", "deliver", "raise"])
def test_a_nan_on_one_rank_is_skipped_by_all_and_nothing_owed_changes(worlds, policy, when):
    ranks = worlds.run(3, nan_on_one_rank, policy, when)
    for rank, (weights, skipped, num, told, seen) in enumerate(ranks):
        assert skipped == [step == when for step in range(9)] and num == 1
        is_nan, is_any, kept, num_owed = seen
        assert kept and (num_owed > 0) == (when == 6)
        assert len(told) == (policy == "raise"), "training goes on after the error"
        if policy == "raise":
            assert f"rank {rank}, step {when}: a gradient had a NaN or Inf on some rank" in told[0]
        else:
            assert (is_nan, is_any) == ((True, True) if policy == "deliver" else (False, False))
        for name, value in weights.items():
            assert torch.equal(value, ranks[0][0][name])


def clipped(group, init_scale: float) -> float:
    rank = torch.distributed.get_rank(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    attached = {"density": 1.0, "warmup_steps": 0, "clip_before": 0.01, "scaler": scaler}
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    x, y = batch(rank, 0)
    scaler.scale(cross_entropy(called(x), y)).backward()
    scaler.unscale_(optimizer)
    handle.close()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def test_clipping_before_the_exchange(worlds):
    plain, scaled = worlds.run(2, clipped, 1.0), worlds.run(2, clipped, 65536.0)
    for norm, under_scale in zip(plain, scaled, strict=True):
        assert 0.001 < norm <= 0.0101
        assert under_scale == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1e4, 3e38])
def test_clipping_gradients_of_any_size(dtype, size):
    grads = [torch.full((50,), min(size, torch.finfo(dtype).max), dtype=dtype) for _ in range(2)]
    clip_(grads, 0.1)
    norm = torch.cat(grads).double().norm().item()
    assert norm == pytest.approx(min(10 * size, 0.1), rel=1e-2)
    clip_([bad := torch.tensor([1.0, float("inf")])], 0.1)
    assert bad.isnan().any()


def drifted(group) -> str:
    rank = torch.distributed.get_rank(group)
    model, called, optimizer, handle = build(
        group, IDIOMS["plain"], 0, {"warmup_steps": 0, "check_every": 5}
    )
    try:
        for step in range(8):
            if step == 3 and rank == 1:
                with torch.no_grad():
                    model.module.middle.weight[0, 0] += 1e-6
            one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
    except RuntimeError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


def test_weights_that_drift_apart_are_found(worlds):
    for said in worlds.run(2, drifted):
        assert "step 5: the weights of 'middle.weight' differ between rank 0 and rank 1" in said


def test_the_checksum_sees_order():
    x = torch.arange(3.0 * BLOCK)
    changed = [x.flip(0), x.roll(1), x.roll(BLOCK), x.clone(), x.clone()]
    changed[3][[4, 9]] = x[[9, 4]]
    changed[4][-1] += 1
    sums = {int(checksum(y)) for y in [x, *changed]}
    assert len(sums) == 6 and int(checksum(x.clone())) in sums
    assert checksum(x[:6].view(2, 3).bfloat16()) == checksum(x[:6].bfloat16())


def threads_of(handle) -> list:
    return [handle.thread._thread, handle._connection.failure_detector._thread]


def after_close(group) -> tuple:
    *parts, handle = build(group, IDIOMS["plain"], 0, {"warmup_steps": 0})
    one_step(*parts, IDIOMS["plain"], 0, 0)
    threads = threads_of(handle)
    handle.close()
    handle.close()
    try:
        one_step(*parts, IDIOMS["plain"], 0, 1)
    except RuntimeError as error:
        return str(error), [thread.is_alive() for thread in threads]
    return "no error", []


def test_training_after_close_is_an_error_not_a_hang(worlds):
    for said, alive in worlds.run(2, after_close):
        assert "the handle of this model was closed" in said
        assert alive == [False, False]


def forgotten(group) -> list[bool]:
    *parts, handle = build(group, IDIOMS["plain"], 0, {"warmup_steps": 0})
    one_step(*parts, IDIOMS["plain"], 0, 0)
    threads = threads_of(handle)
    del parts, handle
    gc.collect()
    for thread in threads:
        thread.join(5)
    return [thread.is_alive() for thread in threads]


def test_a_forgotten_handle_ends_its_threads(worlds):
    assert worlds.run(2, forgotten) == [[False, False]] * 2


def test_a_process_may_end_without_close(tmp_path, free_port):
    """No hang, no crash of a thread that outlives the interpreter, not a word on stderr."""
    script = Path(__file__).parents[1] / "helpers" / "endless.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(rank), "2", f"tcp://127.0.0.1:{free_port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            stdout, stderr = process.communicate(timeout=60)
            assert (process.returncode, stdout, stderr) == (0, "ten steps\n", "")
    finally:
        for process in ranks:
            process.kill()


def failing_callback(group) -> list[int]:
    seen = []

    def keep_and_fail(stats) -> None:
        seen.append(stats.step)
        raise ValueError("a mistake in the callback")

    logging.getLogger("oktopk").disabled = True
    train(group, "plain", 5, {"warmup_steps": 2, "on_step": keep_and_fail})
    logging.getLogger("oktopk").disabled = False
    return seen


def test_a_failing_callback_stops_nobody(worlds):
    assert worlds.run(2, failing_callback) == [[0, 1, 2, 3, 4]] * 2


def exiting_callback(group) -> str:
    def leave(stats) -> None:
        if stats.step == 1 and torch.distributed.get_rank(group) == 1:
            sys.exit("enough")

    try:
        train(group, "plain", 5, {"warmup_steps": 2, "on_step": leave, "timeout": 6})
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_callback_that_exits_is_an_error_everywhere_and_no_hang(worlds):
    first, second = worlds.run(2, exiting_callback)
    assert "rank 1 failed in step 1: SystemExit: enough" in first
    assert "SystemExit: enough" in second


def thawed(group) -> str:
    """A complex parameter that was frozen when `attach` looked, and is in DDP's buckets."""
    model = DistributedDataParallel(Complex(), process_group=group)
    model.module.turn.requires_grad_(False)
    handle = oktopk.attach(model)
    model.module.turn.requires_grad_(True)
    model.module.forward = lambda: model.module.turn.abs().sum()
    try:
        model().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


def test_a_bucket_of_another_size_is_an_error(worlds):
    for said in worlds.run(2, thawed):
        assert "DDP's bucket 0 has 24 elements, and its parameters have 12: ['turn']" in said


def failed_exchange(group) -> bool:
    """Whether what is owed after a failed step is what it was, though the buffers were refilled."""
    rank = torch.distributed.get_rank(group)
    idiom = IDIOMS["gradient_as_bucket_view"]
    how = {"warmup_steps": 0, "timeout": 6, "short_bytes": 0}  # the short path has one exchange
    model, called, optimizer, handle = build(group, idiom, 0, how)
    for step in range(6):
        one_step(model, called, optimizer, idiom, rank, step)
    owed = handle.state_dict()["residuals"]
    reached, exchange = [], handle.comm.exchange

    def fail_later(*args, **more):
        reached.append(1)
        if len(reached) == 2:
            raise oktopk.ExchangeError("a connection is gone")
        return exchange(*args, **more)

    handle.comm.exchange = fail_later
    try:
        one_step(model, called, optimizer, idiom, rank, 6)
    except RuntimeError:
        optimizer.zero_grad(set_to_none=False)
        now = handle.state_dict()["residuals"]
        return all(torch.equal(part, owed[name]) for name, part in now.items())
    finally:
        handle.close()
    return False


def test_a_failed_exchange_is_undone_at_once(worlds):
    assert worlds.run(2, failed_exchange) == [True, True]


def overflowing(group) -> tuple:
    """Finite gradients whose sum is not."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False), process_group=group)
    handle = oktopk.attach(model, density=0.1, warmup_steps=0)
    (model(torch.full((1, 64), 3e38)).sum()).backward()
    handle.close()
    return handle.skipped_steps, bool(model.module.weight.grad.any())


def test_a_sum_that_overflows_is_skipped(worlds):
    assert worlds.run(2, overflowing) == [(1, False)] * 2
