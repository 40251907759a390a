# SPDX-License-Identifier: Apache-2.0
"""Every backend has all functions of the Protocol, and the Triton kernels compile for a GPU.

Without a GPU the Triton kernels run in Triton's interpreter. To run them on a GPU:
TRITON_INTERPRET=0 pytest tests/kernels
"""

import inspect
import os
import subprocess
import sys

import pytest

from oktopk import kernels
from oktopk.kernels import reference

FUNCTIONS = [
    name for name, member in vars(kernels.KernelBackend).items() if inspect.isfunction(member)
]
FUNCTIONS = [name for name in FUNCTIONS if not name.startswith("_")]


def parameters(function):
    """Names and defaults of the parameters, without `self`."""
    listed = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in listed if each.name != "self"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_backend_has_the_functions_of_the_protocol(backend, name):
    wanted = getattr(kernels.KernelBackend, name)
    assert parameters(getattr(backend, name)) == parameters(wanted)


def test_a_backend_says_whether_the_host_knows_its_results_at_once(backend):
    assert isinstance(backend.SYNCHRONOUS, bool)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_of_the_protocol_is_called_by_one_of_the_package(name):
    assert inspect.getdoc(getattr(kernels, name))


def test_a_device_without_kernels_of_its_own_has_the_reference():
    assert kernels.backend_for("meta") is reference


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from oktopk.kernels.cuda import sums, selection, sums

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 80, 32)
    get_current_device = get_current_stream = lambda self, device=0: 0

triton.runtime.driver.set_active(Driver())
f, i = torch.zeros(9), torch.zeros(9, dtype=torch.int32)
half, long, flag = f.half(), i.long(), i.to(torch.int8)
for grid, kernel, *args in [
    (selection.GRID, selection._count, f, f, i),
    (selection.GRID, selection._add_count, f, half, f, f, i),
    (selection.GRID, selection._write, flag, flag, f, long, i, f, 7),
    (selection.GRID, selection._count_digits, long, 1 << 40, 8, i, 2**63 - 1, 256),
    (sums.GRID, sums._add_part, f, flag, i, f, 0),
    (sums.GRID, sums._scatter, half, i, half),
    (sums.GRID, sums._subtract_common, f, i, 9, 4, i, f),
    (sums.WORD_GRID, sums._encode_low, i, 0, 5, 8, 9, i),
    (sums.WORD_GRID, sums._encode_high, i, 0, 5, i),
    (sums.WORD_GRID, sums._count_ones, i, i),
    (sums.WORD_GRID, sums._decode, i, i, i, i, 0, 5, 9, 9, i),
]:
    assert kernel.warmup(*args, 9, grid=(1,), **grid.options).asm["cubin"]
"""


def test_the_triton_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter takes what the compiler refuses; the compiler needs no GPU."""
    pytest.importorskip("triton", reason="the cuda kernels need triton")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "error", "-c", COMPILE], check=True, env=env)
