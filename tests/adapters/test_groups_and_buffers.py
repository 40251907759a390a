# SPDX-License-Identifier: Apache-2.0
"""What users pass beside a plain model and the default group: meshes, limits, odd buffers; and what
they save."""

from __future__ import annotations

import copy
import io
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.comm.torch_transport import TIMEOUT, timeout_of


class Odd(nn.Module):
    """A model with a buffer that is not an ordinary tensor."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("odd", buffer)

    def forward(self, x):
        return self.layer(x)


def local_steps(model: nn.Module, **more) -> oktopk.LocalSteps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return oktopk.local_steps(model, optimizer, verbose=False, **more)


# A mesh instead of a process group.


def through_a_mesh(group) -> tuple[float, int, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("site",))
    reducer, mean = oktopk.Reducer(4, density=1.0, group=mesh["site"]), torch.full((4,), 2.0)
    mean *= dist.get_rank()
    reducer.reduce_(mean)
    handle = local_steps(Odd(torch.zeros(2)), group=mesh["site"])
    size = handle.comm.size
    handle.close()
    square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "two"))
    with pytest.raises(ValueError, match="group is a mesh of 2 dimensions: pass the one") as raised:
        local_steps(Odd(torch.zeros(2)), group=square)
    return float(mean[0]), size, str(raised.value)


def test_a_mesh_of_one_dimension_is_a_group(worlds):
    assert [answer[:2] for answer in worlds.run(2, through_a_mesh)] == [(1.0, 2)] * 2


@pytest.mark.parametrize("make", [local_steps, lambda _, **more: oktopk.Reducer(4, **more)])
def test_what_is_no_group_is_refused_by_its_type(make):
    with pytest.raises(TypeError, match="group must be a process group or a mesh of one dimension"):
        make(nn.Linear(3, 3), group=[0, 1])


# Time limits.


def default_limits(group) -> tuple:
    own = dist.new_group(timeout=timedelta(seconds=77))
    ddp = DistributedDataParallel(nn.Linear(3, 3), process_group=own)
    attached = oktopk.attach(ddp, verbose=False)
    handle = local_steps(nn.Linear(3, 3), group=own)
    limits = [timeout_of(each.comm.transport.group) for each in (attached, handle)]
    attached.close()
    handle.close()
    return timeout_of(own), limits


def test_the_limit_is_that_of_the_process_group(worlds):
    assert timeout_of(None) == TIMEOUT
    for own, limits in worlds.run(2, default_limits):
        assert own == 77
        assert limits == [72] * 2  # 5 s are for finding out which rank is missing


# Buffers.


def with_expanded_buffer(group) -> tuple[torch.Tensor, tuple[int, ...]]:
    model = Odd(torch.full((1, 3), float(dist.get_rank(group))).expand(5, 3))
    local_steps(model, group=group).close()
    return model.odd.clone(), model.odd.stride()


def test_an_expanded_buffer_is_taken_over_and_stays_expanded(worlds):
    for values, strides in worlds.run(2, with_expanded_buffer):
        assert not values.any() and values.shape == (5, 3) and strides == (0, 1)


def with_sparse_buffer(group) -> str:
    with pytest.raises(TypeError) as raised:
        local_steps(Odd(torch.eye(3).to_sparse()), group=group)
    return str(raised.value)


def test_a_sparse_buffer_is_refused_by_its_name(worlds):
    for said in worlds.run(2, with_sparse_buffer):
        assert said.startswith("buffer 'odd' has layout torch.sparse_coo: ")


# What is saved or copied, and what DDP logs.


def saved_and_copied(group) -> list[str]:
    model = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
    handle, said = oktopk.attach(model, verbose=False), []
    said.append(model._get_ddp_logging_data()["comm_hook"])
    for act in (
        lambda: torch.save(model._comm_hooks[0][1], io.BytesIO()),
        lambda: torch.save(handle, io.BytesIO()),
        lambda: copy.deepcopy(handle),
    ):
        with pytest.raises(TypeError, match=r"save handle.state_dict\(\) on every rank") as raised:
            act()
        said.append(str(raised.value))
    handle.close()
    return said


def test_a_handle_says_what_to_save_instead_and_ddp_knows_the_hook_by_name(worlds):
    for hook, *refused in worlds.run(2, saved_and_copied):
        assert hook == "oktopk_hook"
        assert all(said.startswith("Handle holds connections") for said in refused)
