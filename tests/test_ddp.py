"""`attach`: plain DDP at density 1, agreement of all ranks at 2 %, and what the handle tells."""

from __future__ import annotations

import io
import json
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import oktopk
from idioms import IDIOMS, Net, batch, build, one_step, train, weights_of
from oktopk import METHODS, Policy

SPARSE = {"density": 0.02, "warmup_steps": 3, "check_every": 7}


@pytest.mark.parametrize("name", IDIOMS)
def test_density_one_is_plain_ddp(worlds, name):
    plain = worlds.run(2, train, name, 12)
    attached = worlds.run(2, train, name, 12, {"density": 1.0, "warmup_steps": 2})
    for want, got in zip(plain[0], attached[0], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", IDIOMS)
def test_ranks_agree_at_two_percent(worlds, name):
    ranks = worlds.run(2, train, name, 40, SPARSE)
    for mine, other in zip(*ranks, strict=True):
        for parameter, value in mine.items():
            assert torch.equal(value, other[parameter]), parameter


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scope", ["model", "bucket"])
def test_every_method_keeps_the_ranks_together(worlds, method, scope):
    ranks = worlds.run(3, train, "plain", 20, {**SPARSE, "method": method, "scope": scope})
    for other in ranks[1:]:
        for parameter, value in ranks[0][0].items():
            assert torch.equal(value, other[0][parameter]), parameter


def test_four_ranks_are_the_same_after_300_steps(worlds):
    ranks = worlds.run(4, train, "plain", 300, {**SPARSE, "check_every": 100}, timeout=100)
    for other in ranks[1:]:
        for parameter, value in ranks[0][0].items():
            assert torch.equal(value, other[0][parameter]), parameter


def run_and_watch(group, steps: int, attached: dict, policy: dict | None = None) -> list:
    """What a run tells of every step: stats, and what is owed plus applied against what came in."""
    rank = torch.distributed.get_rank(group)
    seen = []
    more = {"policy": Policy(**policy)} if policy is not None else {}
    attached = {**attached, **more, "on_step": seen.append}
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    for step in range(steps):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
        assert handle.stats is seen[-1]
    handle.close()
    return seen


def test_stats_of_every_step_are_complete(worlds):
    for seen in worlds.run(2, run_and_watch, 40, SPARSE):
        assert [s.step for s in seen] == list(range(40))
        assert {s.phase for s in seen[:3]} == {"dense"}
        assert {s.phase for s in seen[3:]} == {"sparse"}
        for stats in seen[3:]:
            assert 0.9 * stats.k <= stats.local <= stats.k
            assert 0.9 * stats.k <= stats.result <= 1.1 * stats.k
            assert 0 < stats.bytes_sent < stats.bytes_dense
            assert stats.local_threshold > 0
        whole = [s.step - 3 for s in seen[3:] if s.stages["counts"].messages_sent == 1]
        assert whole == [0, 1, 2, 4, 8, 16, 32], "these exchange the model at once"


def test_dense_parameters_ride_along(worlds):
    """Biases, norms and the small head arrive whole; they cost no message of their own."""
    without = worlds.run(2, run_and_watch, 12, SPARSE, {"vectors": False, "below": 0})[0]
    with_them = worlds.run(2, run_and_watch, 12, SPARSE)[0]
    total = sum(p.numel() for p in Net().parameters())
    dense = sum(p.numel() for p in Net().parameters() if Policy().is_dense("", p))
    assert with_them[-1].k == round(0.02 * (total - dense)) + dense
    assert without[-1].k == round(0.02 * total)
    assert with_them[-1].messages == without[-1].messages


def owed_and_applied(group, idiom: str, steps: int) -> list:
    """Per step: the gradient this rank computed, the average it got, and what it owes after."""
    rank = torch.distributed.get_rank(group)
    attached = {"density": 0.05, "warmup_steps": 0}
    model, called, _, handle = build(group, IDIOMS[idiom], 0, attached)
    twin = Net()
    twin.load_state_dict(model.module.state_dict())
    done = []
    for step in range(steps):
        x, y = batch(rank, step)
        for net in (model, twin):
            net.zero_grad()
        use_branch = not (IDIOMS[idiom].skips_branch and step % 3)
        cross_entropy(called(x, use_branch), y).backward()
        cross_entropy(twin(x, use_branch), y).backward()
        done.append(
            {
                name: (grad_of(g), grad_of(p), handle.residuals[name].clone())
                for (name, p), g in zip(
                    model.module.named_parameters(), twin.parameters(), strict=True
                )
            }
        )
        for p, g in zip(model.parameters(), twin.parameters(), strict=True):
            g.grad = None
            with torch.no_grad():
                p.sub_(0.01 * grad_of(p))
                g.copy_(p)
    handle.close()
    return done


def grad_of(parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


@pytest.mark.parametrize("idiom", ["plain", "find_unused_parameters"])
def test_nothing_is_lost_from_step_zero_through_the_rebuild(worlds, idiom):
    """DDP rebuilds its buckets after the first step; what is owed follows the parameters.

    It delivers nothing to a parameter no rank used: what is owed there must stay owed.
    """
    ranks = worlds.run(3, owed_and_applied, idiom, 12)
    owed = dict.fromkeys(ranks[0][0], 0.0)
    for done in zip(*ranks, strict=True):
        for name in owed:
            came = sum(rank[name][0].double() for rank in done) + owed[name]
            left = sum(rank[name][2].double() for rank in done)
            applied = done[0][name][1].double() * len(done)
            torch.testing.assert_close(came, applied + left, rtol=1e-5, atol=1e-6)
            owed[name] = left


def resumed_at(group, name: str, stop: int, steps: int) -> tuple:
    """Weights of a run without and of one with a stop, saved and loaded safely."""
    rank, idiom = torch.distributed.get_rank(group), IDIOMS[name]
    straight = train(group, name, steps, SPARSE)[0]
    parts = build(group, idiom, 0, SPARSE)
    for step in range(stop):
        one_step(*parts[:3], idiom, rank, step)
    buffer = io.BytesIO()
    model, _, optimizer, handle = parts
    torch.save([model.state_dict(), optimizer.state_dict(), handle.state_dict()], buffer)
    handle.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model, called, optimizer, handle = build(group, idiom, 1, SPARSE)
    for what, state in zip((model, optimizer, handle), saved, strict=True):
        what.load_state_dict(state)
    for step in range(stop, steps):
        one_step(model, called, optimizer, idiom, rank, step)
    handle.close()
    return straight, weights_of(model)


def checkpointed(group, folder: str) -> tuple:
    """As resumed_at, through torch.distributed.checkpoint into a fresh handle's state."""
    rank = torch.distributed.get_rank(group)
    straight = train(group, "plain", 12, SPARSE)[0]
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, SPARSE)
    for step in range(7):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
    momentum = optimizer.state_dict()
    saved = {"model": model.state_dict(), f"oktopk.{rank}": handle.state_dict()}
    dcp.save(saved, checkpoint_id=folder, process_group=group)
    handle.close()
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 1, SPARSE)
    template = {"model": model.state_dict(), f"oktopk.{rank}": handle.state_dict()}
    dcp.load(template, checkpoint_id=folder, process_group=group)
    model.load_state_dict(template["model"])
    handle.load_state_dict(template[f"oktopk.{rank}"])
    optimizer.load_state_dict(momentum)
    for step in range(7, 12):
        one_step(model, called, optimizer, IDIOMS["plain"], rank, step)
    handle.close()
    return straight, weights_of(model)


def test_distributed_checkpoint_resumes_with_the_same_bits(worlds, tmp_path):
    for straight, resumed in worlds.run(2, checkpointed, str(tmp_path)):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


@pytest.mark.parametrize(
    ("name", "stop"), [("plain", 2), ("plain", 3), ("plain", 11), ("static_graph", 11)]
)
def test_a_resumed_run_has_the_same_bits(worlds, name, stop):
    for straight, resumed in worlds.run(2, resumed_at, name, stop, 20):
        for name, value in straight.items():
            assert torch.equal(value, resumed[name]), name


def hand_over(group, states: list | None) -> dict:
    """Load what another number of ranks saved (or train a little), then save."""
    rank = torch.distributed.get_rank(group)
    parts = build(group, IDIOMS["plain"], 0, SPARSE)
    if states is None:
        for step in range(8):
            one_step(*parts[:3], IDIOMS["plain"], rank, step)
    else:
        parts[3].load_state_dict(states)
    state = parts[3].state_dict()
    if states is not None:
        one_step(*parts[:3], IDIOMS["plain"], rank, 100)
    parts[3].close()
    return state


def owed_by_all(states: list) -> dict:
    return {name: sum(s["residuals"][name] for s in states) for name in states[0]["residuals"]}


def test_another_number_of_ranks_owes_the_same(worlds):
    states = worlds.run(4, hand_over, None)
    assert all(state.keys() == states[0].keys() for state in states)
    for P in (2, 3):
        later = worlds.run(P, hand_over, states)
        torch.testing.assert_close(owed_by_all(later), owed_by_all(states))
        states = later


def attach_badly(group, what: str) -> str:
    model = DistributedDataParallel(Net(), process_group=group)
    try:
        if what == "model":
            oktopk.attach(model.module)
        elif what == "density":
            oktopk.attach(model, density=2.0)
        else:
            handle = oktopk.attach(model)
            facts = json.loads(handle.state_dict()["facts"]) | {"world_size": 9}
            handle.load_state_dict({**handle.state_dict(), "facts": json.dumps(facts)})
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "attach needs a DistributedDataParallel model, got Net"),
        ("density", "density must be in (0, 1], got 2.0"),
        ("state", "saved by 9 ranks and there are 2: pass the list of all ranks' states"),
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
    for lines in worlds.run(2, logged, 5):
        assert len(lines) == 1
        assert lines[0].startswith("INFO step 3: the sparse phase begins, oktopk at density 0.02")
    for lines in worlds.run(2, logged, 3):
        assert lines[0].startswith("WARNING the run has 3 steps and the warm-up 3")


def nan_on_one_rank(group, attached: dict) -> tuple:
    """Step 6 has a NaN on rank 1 only."""
    rank = torch.distributed.get_rank(group)
    skipped = []
    attached = {**SPARSE, **attached, "on_step": lambda stats: skipped.append(stats.skipped)}
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    for step in range(10):
        x, y = batch(rank, step)
        if step == 6 and rank == 1:
            x = x * float("nan")
        optimizer.zero_grad()
        cross_entropy(called(x), y).backward()
        before = weights_of(model)
        optimizer.step()
        if step == 6:
            finite = all(p.grad.isfinite().all() for p in model.parameters())
    handle.close()
    owed_is_finite = all(owed.isfinite().all() for owed in handle.residuals.values())
    del before
    return weights_of(model), skipped, handle.skipped_steps, finite, owed_is_finite


def test_a_nan_on_one_rank_is_skipped_by_all(worlds):
    ranks = worlds.run(3, nan_on_one_rank, {})
    for weights, skipped, num, finite, owed_is_finite in ranks:
        assert skipped == [step == 6 for step in range(10)]
        assert num == 1 and finite and owed_is_finite
        for name, value in weights.items():
            assert torch.equal(value, ranks[0][0][name])


def scaled(group) -> tuple:
    """A loss scale that doubles must not double what is owed."""
    rank = torch.distributed.get_rank(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    attached = {"density": 0.05, "warmup_steps": 0, "scaler": scaler}
    plain = train(group, "plain", 16, {"density": 0.05, "warmup_steps": 0})[0]
    model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    scales = []
    for step in range(16):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(called(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    handle.close()
    return plain, weights_of(model), scales


def test_residuals_follow_the_loss_scale(worlds):
    """Scales are powers of two, so a run with them has the very bits of the run without."""
    for plain, weights, scales in worlds.run(2, scaled):
        assert len(set(scales)) > 2
        for name, value in plain.items():
            assert torch.equal(value, weights[name]), name


def rates(group, follow: bool) -> float:
    """The norm of what is owed right after the rate fell to a tenth."""
    rank = torch.distributed.get_rank(group)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = oktopk.attach(
        model, density=0.01, warmup_steps=0, optimizer=optimizer if follow else None
    )
    for step in range(6):
        if step == 5:
            optimizer.param_groups[0]["lr"] = 0.01
        x, y = batch(rank, step)
        optimizer.zero_grad()
        (cross_entropy(model(x), y) * (0.0 if step == 5 else 1.0)).backward()
        optimizer.step()
    handle.close()
    return sum(float(owed.norm()) for owed in handle.residuals.values())


def test_residuals_follow_the_learning_rate_when_asked(worlds):
    follows, stays = worlds.run(2, rates, True), worlds.run(2, rates, False)
    for with_it, without in zip(follows, stays, strict=True):
        assert 5 < with_it / without < 15


def clipped(group) -> tuple[float, float]:
    rank = torch.distributed.get_rank(group)
    model, called, _, handle = build(
        group, IDIOMS["plain"], 0, {"density": 1.0, "warmup_steps": 0, "clip_before": 0.01}
    )
    x, y = batch(rank, 0)
    cross_entropy(called(x), y).backward()
    handle.close()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), rank


def test_clipping_before_the_exchange(worlds):
    for norm, _ in worlds.run(2, clipped):
        assert 0 < norm <= 0.0101


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
        assert "step 5: the weights of 'middle.weight' differ between rank 0 and ranks [1]" in said


def after_close(group) -> str:
    parts = build(group, IDIOMS["plain"], 0, {"warmup_steps": 0})
    one_step(*parts[:3], IDIOMS["plain"], 0, 0)
    parts[3].close()
    try:
        one_step(*parts[:3], IDIOMS["plain"], 0, 1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_training_after_close_is_an_error_not_a_hang(worlds):
    for said in worlds.run(2, after_close):
        assert "the handle of this model was closed" in said


def told_of_nans(group) -> tuple:
    """A NaN on rank 1 in step 4, under the policy that raises; training goes on."""
    rank, seen, raised = torch.distributed.get_rank(group), [], []

    def keep_and_fail(stats) -> None:
        seen.append(stats)
        raise ValueError("a mistake in the callback")

    attached = {"warmup_steps": 2, "on_nonfinite": "raise", "on_step": keep_and_fail}
    logging.getLogger("oktopk").disabled = True
    _, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
    for step in range(7):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        try:
            loss = cross_entropy(called(x * float("nan") if (step, rank) == (4, 1) else x), y)
            loss.backward()
        except RuntimeError as error:
            raised.append((step, str(error)))
            break
    handle.close()
    logging.getLogger("oktopk").disabled = False
    return [s.step for s in seen], [s.skipped for s in seen], raised


def test_a_nan_can_be_raised_and_a_failing_callback_stops_nobody(worlds):
    for steps, skipped, raised in worlds.run(2, told_of_nans):
        assert steps == [0, 1, 2, 3, 4] and skipped == [False] * 4 + [True]
        assert len(raised) == 1 and "step 4: a gradient had a NaN or Inf" in raised[0][1]


def overflowing(group) -> tuple:
    """Finite gradients whose sum is not."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False), process_group=group)
    handle = oktopk.attach(model, density=0.1, warmup_steps=0)
    (model(torch.full((1, 64), 3e38)).sum()).backward()
    handle.close()
    return handle.skipped_steps, bool(model.module.weight.grad.any())


def test_a_sum_that_overflows_is_skipped(worlds):
    assert worlds.run(2, overflowing) == [(1, False)] * 2
