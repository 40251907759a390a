# SPDX-License-Identifier: Apache-2.0
"""Inputs for the kernels, and the comparison of a backend with the reference, bit for bit."""

import math
import os

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oktopk import kernels
from oktopk.kernels import reference
from oktopk.sparse import Sparse

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F32, F64]
PAIRS = [(F32, F32), (F32, F16), (F32, BF16), (F64, F64), (F64, F32), (F64, F16), (F64, BF16)]
NUMPY = {F32: np.float32, F64: np.float64}
SIZES = [0, 1, 31, 32, 33, 64, 95, 97, 4095, 4096, 4097, 10_001]  # around a word and a block
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-40, -1e-40, 3e38]
THRESHOLDS = [1e-300, 1e-50, 1e-40, 1.0, 1e300, math.inf]
LENGTHS = st.integers(0, 300)

examples = settings(deadline=None, max_examples=30)  # no deadline: numba compiles on first use


def on(device, thing):
    """A copy on a device, of whatever a kernel takes or gives."""
    if isinstance(thing, Sparse):
        return Sparse(on(device, thing.indices), on(device, thing.values), thing.numel)
    if isinstance(thing, kernels.SecondMoment):
        return kernels.SecondMoment(*(on(device, part) for part in thing))
    if isinstance(thing, tuple | list):
        return [on(device, part) for part in thing]
    return thing.to(device, copy=True) if isinstance(thing, torch.Tensor) else thing


def bits(thing):
    """Something equal only for equal bits. NaNs are all one: their payload depends on the chip."""
    if isinstance(thing, Sparse):
        return bits([thing.indices, thing.values, thing.numel])
    if isinstance(thing, tuple | list):
        return [bits(part) for part in thing]
    if not isinstance(thing, torch.Tensor):
        return repr(thing)
    wide = thing.double().nan_to_num(math.nan, math.inf, -math.inf)
    return thing.dtype, wide.view(torch.int64).tolist()


def run(backend, name, *args):
    """What a kernel gives back, then its arguments as they are after the call."""
    triton, compiled = backend.__name__.endswith("cuda"), os.environ["TRITON_INTERPRET"] == "0"
    args = on("cuda" if triton and compiled else "cpu", args)
    # the interpreter adds in numpy, which warns of inf - inf
    with np.errstate(all="ignore" if triton else "warn"):
        result = getattr(backend, name)(*args)
    return on("cpu", [result, *args])


def check(backend, name, *args):
    assert bits(run(backend, name, *args)) == bits(run(reference, name, *args))


def check_out(backend, x, grad, capacity):
    """What is written to given tensors is what new tensors would have, but for the offset."""
    acc = torch.empty_like(x)
    plain, count = reference.accumulate_select(x, grad, acc, 0.75, capacity)
    out = (
        torch.full([capacity + kernels.SPARE_SLOTS], -1, dtype=torch.int32),
        x.new_zeros(capacity + kernels.SPARE_SLOTS),
    )
    results = run(backend, "accumulate_select", x, grad, acc, 0.75, capacity, out, 9)
    (found, seen), written = results[0], results[6]
    assert seen == count and found.numel == 9 + x.numel()
    assert bits(found.values) == bits(plain.values)
    assert found.indices.tolist() == (plain.indices + 9).tolist()
    assert written[0][: found.num].equal(found.indices)


def joined(parts):
    """Selections as they arrive: all indices, all values, and how many of each."""
    indices = torch.cat([part.indices for part in parts])
    return indices, torch.cat([part.values for part in parts]), [part.num for part in parts]


def cast(x, dtype):
    """x.to(dtype), but no subnormals in bfloat16: Triton's interpreter widens them wrongly."""
    x = x.to(dtype)
    return x.masked_fill(x.abs() < torch.finfo(dtype).tiny, 0) if dtype == BF16 else x


def vector(n, dtype, seed=0):
    """Values with ties and zeros and, from 33 on, everything special."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=F64)
    x[::3] = (x[::3] * 4).round() / 4
    x[23 : 23 + len(SPECIAL)] = torch.tensor(SPECIAL)[: max(n - 23, 0)]
    return cast(x, dtype)


def vectors(dtype, sizes):
    """Any values of a dtype: hypothesis repeats most of them, so there are ties."""
    base = dtype if dtype in NUMPY else F32
    floats = st.sampled_from(SPECIAL) | st.floats(width=64 if base == F64 else 32)
    drawn = arrays(NUMPY[base], sizes, elements=floats.map(NUMPY[base]))
    return drawn.map(lambda x: cast(torch.from_numpy(x), dtype))


def thresholds(x):
    """Any positive threshold, often one that is a magnitude of x."""
    magnitudes = [m for m in x.double().abs().tolist() if m > 0]
    return st.sampled_from([*THRESHOLDS, *magnitudes]) | st.floats(1e-45, 1e39)


@st.composite
def sparses(draw, lo, hi, dtype):
    indices = sorted(draw(st.sets(st.integers(lo, hi - 1)))) if hi > lo else []
    values = draw(vectors(dtype, st.just(len(indices))))
    return Sparse(torch.tensor(indices, dtype=torch.int32), values, hi)
