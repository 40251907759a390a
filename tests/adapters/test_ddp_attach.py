# SPDX-License-Identifier: Apache-2.0
"""What `attach` compares and refuses before a rank waits for another, and what it takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import oktopk
from idioms import IDIOMS, SPARSE, Net, batch, build, one_step, weights_of
from oktopk.adapters import ddp_validation
from oktopk.comm.communicator import Comm
from oktopk.comm.simulated import single_rank_comm
from oktopk.comm.torch_transport import TorchTransport
from oktopk.errors import ExchangeError
from oktopk.exchange import layout
from oktopk.settings import Settings


def left_behind() -> tuple[int, int]:
    """Threads of ours and process groups."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("oktopk")]
    return len(ours), len(dist.distributed_c10d._world.pg_map)


# Ranks that differ


def attach_differently(group, what: str) -> str:
    """Rank 1 differs in one thing; `policy` makes another tensor of the same size dense."""
    first = dist.get_rank(group) == 0
    model = DistributedDataParallel(Net(), process_group=group)
    attached = {
        "check_every": {"check_every": 5 if first else 0},
        "policy": {"policy": oktopk.Policy(patterns=("middle.*" if first else "branch.*",))},
        "auto": {"method": "auto" if first else "oktopk"},
        "timeout": {"timeout": 6.0 if first else 7.0},
        "clip_before": {"clip_before": 1.0 if first else None},
        "scaler": {"scaler": torch.amp.GradScaler("cpu") if first else None},
        "dtype": {},
    }[what]
    if what == "dtype" and not first:
        model.to(torch.bfloat16)
    before = left_behind()
    try:
        oktopk.attach(model, **{"timeout": 6.0, **attached})
    except ValueError as error:
        return str(error) if left_behind() == before else "something was left behind"
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("check_every", "check_every is 5 on rank 0 but 0 on rank 1"),
        ("policy", "parameter 'middle.weight' is [48, 48] torch.float32 cpu dense on rank 0 but"),
        ("auto", "the ranks disagree: method is auto on rank 0 but oktopk on rank 1"),
        ("timeout", "the ranks disagree: timeout is 6.0 on rank 0 but 7.0 on rank 1"),
        ("clip_before", "the ranks disagree: clip_before is 1.0 on rank 0 but None on rank 1"),
        ("scaler", "scaler is True on rank 0 but False on rank 1"),
        ("dtype", "parameter 'inner.weight' is [48, 20] torch.float32 cpu dense on rank 0 but"),
    ],
)
def test_ranks_that_attach_differently_are_told_by_the_same_error(worlds, what, message):
    first, second = worlds.run(2, attach_differently, what)
    assert message in first
    assert second == first


def attach_on_one_rank(group) -> str:
    own = dist.new_group([0, 1])  # calls of attach are counted by group: others stay even
    model = DistributedDataParallel(Net(), process_group=own)
    told = ""
    if dist.get_rank(own) == 0:
        try:
            oktopk.attach(model, timeout=1)
        except ExchangeError as error:
            told = str(error)
    dist.barrier(own)
    dist.destroy_process_group(own)
    return told


def test_a_rank_that_does_not_attach_is_named(worlds):
    first, _ = worlds.run(2, attach_on_one_rank)
    assert "rank 1 did not call attach within 1 s" in first


# What is refused


def meta(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, device="meta"))


def on_two_devices(model) -> None:
    model._module_parameters = [*model._module_parameters, meta(3)]


def on_an_accelerator(model) -> None:
    model._module_parameters = [meta(3)]
    ddp_validation._backends = lambda _: "cpu:gloo,meta:gloo"


def with_a_builtin_hook(model) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def with_the_python_reducer(model) -> None:
    model._use_python_reducer = True


def huge(model) -> None:
    layout.MAX_INDEXABLE = 2000


PREPARED = {
    "several devices": on_two_devices,
    "gloo": on_an_accelerator,
    "hook": lambda model: model.register_comm_hook(None, allreduce_hook),
    "built-in hook": with_a_builtin_hook,
    "attached": oktopk.attach,
    "python reducer": with_the_python_reducer,
    "huge": huge,
}


def wrapped(group, what: str) -> DistributedDataParallel:
    net, more = Net(), {}
    if what == "mixed precision":
        more = {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)}
    elif what == "in backward":
        net.head.weight._in_backward_optimizers = []  # as _apply_optimizer_in_backward does
    elif what == "delayed":
        net.head.requires_grad_(False)
        more = {
            "delay_all_reduce_named_params": [
                (name, p) for name, p in net.named_parameters() if p.requires_grad
            ],
            "param_to_hook_all_reduce": net.inner.weight,
        }
    return DistributedDataParallel(net, process_group=group, **more)


def refused(group, what: str) -> tuple:
    model = wrapped(group, what)
    most, backends = layout.MAX_INDEXABLE, ddp_validation._backends
    PREPARED.get(what, lambda _: None)(model)
    before = left_behind()
    try:
        oktopk.attach(model)
    except (TypeError, ValueError) as error:
        return str(error), left_behind() == before
    finally:
        layout.MAX_INDEXABLE, ddp_validation._backends = most, backends
        for _, state in getattr(model, "_comm_hooks", []):
            if hasattr(state, "handle"):
                state.handle.close()
    return "no error", False


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("several devices", "the parameters are on several devices (cpu, meta)"),
        ("gloo", "the parameters are on meta and the process group is gloo"),
        ("hook", "this model has the communication hook 'allreduce_hook' already"),
        ("built-in hook", "this model has the communication hook 'BuiltinCommHookType.ALLREDUCE'"),
        ("attached", "this model is attached already: close() its handle first"),
        ("mixed precision", "this model has DDP's own mixed precision"),
        ("in backward", "an optimizer runs in the backward of this model"),
        ("delayed", "this model delays the all-reduce of all its parameters"),
        ("python reducer", "optimize_ddp='python_reducer'"),
        ("huge", "the model has 8405 trainable entries, and no more than 2000 can be selected"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(worlds, what, message):
    ((said, clean),) = worlds.run(1, refused, what)
    assert message in said
    assert clean


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        ([(2**31 - 1,)], {}, None),
        ([(2**31 - 1,), (1,)], {}, "the model has 2147483648 trainable entries"),
        ([(2**16, 2**16)], {"method": "dense"}, None),
        ([(2**20, 2**10)] * 9, {"scope": "bucket"}, None),
        ([(2**20, 2**10)] * 9, {"scope": "bucket", "warmup_steps": 0}, "a bucket has 9663676416"),
        ([(2**31,)], {"scope": "bucket"}, "a bucket has 2147483648 trainable entries"),
    ],
)
def test_more_entries_than_int32_can_index_are_refused(shapes, more, message):
    model = SimpleNamespace(
        _module_parameters=[*(meta(*shape) for shape in shapes), meta(2**40).requires_grad_(False)],
        bucket_bytes_cap=25 * 2**20,
    )
    if message is None:
        ddp_validation.check_size(model, Settings(**{"warmup_steps": 4, **more}))
    else:
        with pytest.raises(ValueError, match=message):
            ddp_validation.check_size(model, Settings(**{"warmup_steps": 4, **more}))


def by_bucket(group) -> bool:
    """A model with more entries than can be indexed together, in buckets that have fewer."""
    most, layout.MAX_INDEXABLE = layout.MAX_INDEXABLE, 8000
    try:
        *parts, handle = build(group, IDIOMS["plain"], 0, {"warmup_steps": 4, "scope": "bucket"})
        for step in range(6):
            one_step(*parts, IDIOMS["plain"], dist.get_rank(group), step)
        handle.close()
    finally:
        layout.MAX_INDEXABLE = most
    return handle.stats.phase == "sparse" and handle.stats.numel > 8000


def test_a_model_of_any_size_works_bucket_by_bucket(worlds):
    assert all(worlds.run(2, by_bucket))


def fails_late(group) -> bool:
    """The last step of attach fails."""
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = torch.optim.Adam(model.parameters())
    before = left_behind()

    def fail(*_) -> None:
        raise RuntimeError("no hook for you")

    model.register_comm_hook = fail
    try:
        oktopk.attach(model, optimizer=optimizer, timeout=6)
    except RuntimeError:
        return left_behind() == before and not optimizer._optimizer_step_pre_hooks
    return False


def test_nothing_is_left_behind_where_a_later_step_of_attach_fails(worlds):
    assert worlds.run(2, fails_late) == [True, True]


# What works


def attached_again(group) -> tuple:
    rank, idiom = dist.get_rank(group), IDIOMS["plain"]
    *parts, first = build(group, idiom, 0, {"warmup_steps": 2, "check_every": 1})
    for step in range(5):
        one_step(*parts, idiom, rank, step)
    first.close()
    second = oktopk.attach(parts[0], method="topka", density=0.1, warmup_steps=1, check_every=1)
    for step in range(5, 10):
        one_step(*parts, idiom, rank, step)
    second.close()
    return weights_of(parts[0]), first.step, second.step, second.stats.phase


def test_a_model_is_attached_again_after_close(worlds):
    ranks = worlds.run(2, attached_again)
    for weights, *steps in ranks:
        assert steps == [5, 5, "sparse"]
        assert all(torch.equal(value, ranks[0][0][name]) for name, value in weights.items())


def accounted(group) -> tuple:
    seen = []
    attached = {**SPARSE, "check_every": 3, "on_step": seen.append}
    *parts, handle = build(group, IDIOMS["plain"], 0, attached)
    for step in range(9):
        one_step(*parts, IDIOMS["plain"], dist.get_rank(group), step)
    handle.close()
    total = handle.comm.ledger.total() - handle.comm.ledger.stages["handshake"]
    return seen, total.sent, total.received, total.messages_sent


def test_every_byte_after_the_handshake_is_in_a_step(worlds):
    for seen, sent, received, messages in worlds.run(2, accounted):
        assert sum(stats.bytes_sent for stats in seen) == sent
        assert sum(stats.bytes_received for stats in seen) == received
        assert sum(stats.messages for stats in seen) == messages
        assert [stats.step for stats in seen if "weights" in stats.stages] == [3, 6]
        for stats in seen:
            assert stats.bytes_sent == sum(part.sent for part in stats.stages.values())


def made_with(group, what: str) -> tuple:
    torch.manual_seed(0)
    net, rank = Net(), dist.get_rank(group)
    late = [(name, p) for name, p in net.named_parameters() if name.startswith("head")]
    more = {
        "static_graph": {"static_graph": True},
        "delay_all_reduce_named_params": {
            "delay_all_reduce_named_params": late,
            "param_to_hook_all_reduce": net.inner.weight,
        },
        "device_mesh": {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))},
        "forward_sync_buffers": {"forward_sync_buffers": False},
    }[what]
    group = None if what == "device_mesh" else group
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.02, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = oktopk.attach(model, **{**SPARSE, "check_every": 1})
    for step in range(8):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    handle.close()
    return weights_of(model), handle.stats.phase


@pytest.mark.parametrize(
    "what", ["static_graph", "delay_all_reduce_named_params", "device_mesh", "forward_sync_buffers"]
)
def test_models_that_were_wrapped_in_other_ways(worlds, what):
    ranks = worlds.run(2, made_with, what)
    for weights, phase in ranks:
        assert phase == "sparse"
        for name, value in weights.items():
            # on CPUs nobody waits for the all-reduce that DDP has delayed: those are torch's
            if not (what == "delay_all_reduce_named_params" and name.startswith("head")):
                assert torch.equal(value, ranks[0][0][name]), name


def _refusal(group, comm) -> str:
    try:
        build(group, IDIOMS["plain"], 0, SPARSE | {"comm": comm})
    except (TypeError, ValueError) as error:
        return str(error)
    return "accepted"


def over_another_communicator(group) -> tuple:
    """Weights with and without a communicator of the user's, what it counted, and two refusals."""
    weights = []
    for comm in (None, Comm(TorchTransport(torch.distributed.new_group()))):
        attached = SPARSE | {"comm": comm}
        model, called, optimizer, handle = build(group, IDIOMS["plain"], 0, attached)
        for step in range(6):
            one_step(model, called, optimizer, IDIOMS["plain"], handle.comm.rank, step)
        torch.distributed.barrier(group)
        used, sent = handle.comm is comm, sum(t.sent for t in handle.comm.ledger.stages.values())
        if comm is not None:  # one that is in use is refused; closing the handle leaves it open
            busy = _refusal(group, comm)
        handle.close()
        weights.append(weights_of(model))
    assert comm.all_gather_size(3, torch.device("cpu"), stage="test") == [3, 3]
    said = [busy, *(_refusal(group, wrong) for wrong in (print, single_rank_comm()))]
    return weights, used, sent, said


def test_attach_takes_any_communicator(worlds):
    for (without, given), used, sent, said in worlds.run(2, over_another_communicator):
        assert used and sent > 0
        assert all(torch.equal(without[name], given[name]) for name in without)
        assert said[0].startswith("this comm serves another attached model")
        assert said[1].startswith("comm must be an oktopk.Comm")
        assert "they must be the same" in said[2]
