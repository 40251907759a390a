"""Every form of a kernel equals the reference bit for bit; the reference equals the definition.

Without a GPU the Triton kernels run in Triton's interpreter, and are compiled for one at the end.
On a GPU: TRITON_INTERPRET=0 pytest tests/kernels/test_kernels.py
"""

import importlib
import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from oktopk import kernels
from oktopk.kernels import reference
from oktopk.optim.staleness import shares
from oktopk.sparse import Sparse, empty
from oktopk.wire.codec import Run

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F32, F64]
PAIRS = [(F32, F32), (F32, F16), (F32, BF16), (F64, F64), (F64, F32), (F64, F16), (F64, BF16)]
NUMPY = {F32: np.float32, F64: np.float64}
SIZES = [0, 1, 31, 32, 33, 64, 95, 97, 4095, 4096, 4097, 10_001]  # around a word and a block
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-40, -1e-40, 3e38]
THRESHOLDS = [1e-300, 1e-50, 1e-40, 1.0, 1e300, math.inf]
LENGTHS = st.integers(0, 300)

examples = settings(deadline=None, max_examples=30)  # no deadline: numba compiles on first use


@pytest.fixture(scope="module", params=["reference", *kernels.FORMS])
def form(request):
    """A module of kernels, one after the other."""
    package, module = kernels.FORMS.get(request.param, ("torch", "oktopk.kernels.reference"))
    pytest.importorskip(package, reason=f"the {request.param} kernels need {package}")
    return importlib.import_module(module)


def on(device, thing):
    """A copy on a device, of whatever a kernel takes or gives."""
    if isinstance(thing, Sparse):
        return Sparse(on(device, thing.indices), on(device, thing.values), thing.numel)
    if isinstance(thing, kernels.Late):
        return kernels.Late(*(on(device, part) for part in thing))
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


def run(form, name, *args):
    """What a kernel gives back, then its arguments as they are after the call."""
    triton, compiled = form.__name__.endswith("cuda"), os.environ["TRITON_INTERPRET"] == "0"
    args = on("cuda" if triton and compiled else "cpu", args)
    # the interpreter adds in numpy, which warns of inf - inf
    with np.errstate(all="ignore" if triton else "warn"):
        result = getattr(form, name)(*args)
    return on("cpu", [result, *args])


def check(form, name, *args):
    assert bits(run(form, name, *args)) == bits(run(reference, name, *args))


def check_into(form, x, grad, capacity):
    """What is written to given room is what would come in new tensors, counted from a base."""
    acc = torch.empty_like(x)
    plain, count = reference.accumulate_select(x, grad, acc, 0.75, capacity)
    room = (
        torch.full([capacity + kernels.SLACK], -1, dtype=torch.int32),
        x.new_zeros(capacity + kernels.SLACK),
    )
    run_on = run(form, "accumulate_select", x, grad, acc, 0.75, capacity, room, 9)
    (found, seen), into = run_on[0], run_on[6]
    assert seen == count and found.numel == 9 + x.numel()
    assert bits(found.values) == bits(plain.values)
    assert found.indices.tolist() == (plain.indices + 9).tolist()
    assert into[0][: found.num].equal(found.indices)


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


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_kth_magnitude_equals_the_reference(form, data, dtype):
    x = data.draw(vectors(dtype, st.integers(1, 300)))
    check(form, "kth_magnitude", x, data.draw(st.integers(1, x.numel())))


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_select_equals_the_reference(form, data, dtype):
    x = data.draw(vectors(dtype, LENGTHS))
    capacity = data.draw(st.integers(0, x.numel() + 2))
    check(form, "select", x, data.draw(thresholds(x)), capacity)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_accumulate_select_equals_the_reference(form, data, dtype):
    residual = data.draw(vectors(dtype, LENGTHS))
    grad = data.draw(vectors(dtype, st.just(residual.numel())))
    capacity = data.draw(st.integers(0, residual.numel() + 2))
    threshold = data.draw(thresholds(residual))
    acc = torch.zeros_like(residual)
    check(form, "accumulate_select", residual, grad, acc, threshold, capacity)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), lo=st.integers(0, 40))
@examples
def test_merge_equals_the_reference(form, data, dtype, lo):
    hi = lo + data.draw(st.integers(0, 60))
    parts = data.draw(st.lists(sparses(lo, hi, dtype), min_size=1, max_size=5))
    check(form, "merge", *joined(parts), lo, hi)


@given(data=st.data(), dtypes=st.sampled_from(PAIRS), divisor=st.sampled_from([1, 2, 3, 7]))
@examples
def test_settle_equals_the_reference(form, data, dtypes, divisor):
    residual = data.draw(vectors(dtypes[0], st.integers(0, 60)))
    grad = data.draw(vectors(dtypes[1], st.just(residual.numel())))
    result, local = (data.draw(sparses(0, residual.numel(), dtypes[0])) for _ in range(2))
    factor = data.draw(st.sampled_from([1.0, 1.3]))
    for base in (0, 7):
        moved = [Sparse(s.indices + base, s.values, s.numel + base) for s in (result, local)]
        check(form, "settle_", grad, residual, *moved, divisor, factor, base)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_around_a_word_and_a_block(form, n, dtype):
    x, grad = vector(n, dtype), vector(n, dtype, seed=1)
    for capacity in (0, 1, n // 3, n):
        check(form, "select", x, 0.75, capacity)
        check(form, "accumulate_select", x, grad, torch.zeros_like(x), 0.75, capacity)
        check_into(form, x, grad, capacity)
    for k in range(1, n + 1, max(n // 3, 1)):
        check(form, "kth_magnitude", x, k)
    parts = [reference.select(part, 0.75, n)[0] for part in (x, grad, x + grad)]
    check(form, "merge", *joined(parts), 0, n)
    check(form, "settle_", grad, x, parts[2], parts[0], 3, 1.0)


@pytest.mark.parametrize("n", [1, 33, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kth_magnitude_is_the_kth_of_the_sorted_magnitudes(n, dtype):
    x = vector(n, dtype)
    # a NaN before everything else, then the largest first
    order = sorted(map(abs, x.tolist()), key=lambda m: (not math.isnan(m), -m))
    assert [repr(reference.kth_magnitude(x, k + 1)) for k in range(n)] == list(map(repr, order))


@pytest.mark.parametrize("n", [0, 1, 33, 500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_select_keeps_what_is_not_below_the_threshold(n, dtype):
    x = vector(n, dtype)
    kept, count = reference.select(x, 0.75, n)
    want = [i for i, value in enumerate(x.tolist()) if abs(value) >= 0.75 or math.isnan(value)]
    assert (kept.indices.tolist(), kept.indices.dtype) == (want, torch.int32)  # so they ascend
    assert (count, kept.numel) == (len(want), n)
    assert bits(kept.values) == bits(x[want])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_threshold_itself_is_kept(form, dtype):
    below = np.nextafter(NUMPY[dtype](0.1), NUMPY[dtype](0)).item()
    x = torch.tensor([0.1, below, -0.1, -below, 0.0] * 20, dtype=dtype)
    (kept, count), *_ = run(form, "select", x, 0.1, 100)
    assert kept.indices.tolist() == [i for i in range(100) if i % 5 in (0, 2)]
    assert count == 40


@pytest.mark.parametrize("n", [10, 10_000])
def test_beyond_the_capacity_only_the_count_goes_on(form, n):
    (kept, count), *_ = run(form, "select", torch.ones(n), 1.0, 7)
    assert (kept.indices.tolist(), count) == (list(range(7)), n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulating_adds_once_and_leaves_the_residual_alone(form, dtype):
    grad, residual = vector(100, dtype), torch.full((100,), 0.1, dtype=dtype)
    want = residual + grad
    after = run(form, "accumulate_select", residual, grad, torch.zeros_like(grad), 0.75, 100)
    selected = list(reference.select(want, 0.75, 100))
    assert bits(after[:4]) == bits([selected, residual, grad, want])


@given(data=st.data(), dtype=st.sampled_from(DTYPES), k=st.integers(0, 60))
@examples
def test_trim_equals_the_reference_and_keeps_k_at_most(form, data, dtype, k):
    x = data.draw(vectors(dtype, LENGTHS))
    found, _ = reference.select(x, 0.5, x.numel())
    kept, threshold = reference.trim(found, 0.5, k)
    mine, same = run(form, "trim", found, 0.5, k)[0]
    assert bits([mine, same]) == bits([kept, threshold])
    assert kept.num <= k and kept.values.abs().lt(threshold).sum() == 0


def test_trim_is_within_a_percent_of_k(form):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(3))
    (found, _), *_ = run(form, "select", x, 1.5, 100_000)
    (kept, threshold), *_ = run(form, "trim", found, 1.5, 10_000)
    assert 9_900 <= kept.num <= 10_000
    assert kept.num == int((x.abs() >= threshold).sum())


@given(data=st.data(), dtype=st.sampled_from(DTYPES), factor=st.sampled_from([1.0, 1.3]))
@examples
def test_add_at_equals_the_reference(form, data, dtype, factor):
    x = data.draw(vectors(dtype, st.integers(0, 60)))
    there = data.draw(sparses(5, 5 + x.numel(), dtype))
    check(form, "add_at_", x, there, factor, 5)


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_least_magnitude_equals_the_reference(form, data, dtype):
    check(form, "least_magnitude", data.draw(vectors(dtype, st.integers(1, 99))))


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
@examples
def test_count_reaching_equals_the_reference(form, data, dtype):
    x = data.draw(vectors(dtype, LENGTHS))
    check(form, "count_reaching", x, [0.0, 0.5, 1.0, 3.0])


@given(data=st.data(), dtype=st.sampled_from([F32, F32, BF16]), scale=st.sampled_from([1.0, 3.0]))
@settings(deadline=None, max_examples=60)
def test_take_late_equals_the_reference(form, data, dtype, scale):
    grad = data.draw(vectors(dtype, st.integers(0, 60)))
    square = data.draw(vectors(F32, st.just(grad.numel()))).abs()
    arrived = data.draw(arrays(np.int32, grad.numel(), elements=st.integers(-40, 8)))
    table = shares(0.99, 11, torch.device("cpu"))
    late = [kernels.Late(grad, square, torch.from_numpy(arrived), table, 0.99)] * 2
    found_inf = data.draw(st.sampled_from([None, torch.zeros(()), torch.ones(())]))
    check(form, "take_late", late, 9, scale, found_inf)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_zeros_do_not_arrive_and_the_smallest_values_do(form, dtype):
    tiny = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 1.2e-38)
    grad = torch.tensor([0.0, 1.0, -0.0, tiny, -2.0], dtype=dtype)
    arrived, table = torch.zeros(5, dtype=torch.int32), shares(0.9, 11, torch.device("cpu"))
    for beta in (0.9, 0.0):  # Adam allows 0
        late = [kernels.Late(grad, torch.ones(5), arrived, table, beta)]
        ((found, *_),), (after,), *_ = run(form, "take_late", late, 9, 1.0, None)
        assert found.tolist() == [1, 3, 4]
        assert after.arrived.tolist() == [0, 9, 0, 9, 9]


@pytest.mark.parametrize("order", list(itertools.permutations([1e8, 1.0, -1e8])))
def test_merge_adds_in_the_order_of_the_parts(form, order):
    want = np.float32(0)
    for value in order:
        want = want + np.float32(value)  # 1 is lost beside 1e8: six orders, two sums
    indices = torch.full((3,), 5, dtype=torch.int32)
    merged, *_ = run(form, "merge", indices, torch.tensor(order), [1, 1, 1], 4, 9)
    assert (merged.indices.tolist(), merged.values.tolist(), merged.numel) == ([5], [want], 9)


@pytest.mark.parametrize("grad_dtype", [F32, F16, BF16])
def test_settle_divides_and_clears_what_was_sent_and_came_back(form, grad_dtype):
    grad, residual = torch.ones(8, dtype=grad_dtype), torch.arange(1.0, 9.0)
    result = Sparse(torch.tensor([1, 4, 6], dtype=torch.int32), torch.tensor([1.0, 0.7, 5.0]), 8)
    local = Sparse(torch.tensor([0, 4, 6], dtype=torch.int32), torch.tensor([1.0, 5, 6.75]), 8)
    _, grad, residual, *_ = run(form, "settle_", grad, residual, result, local, 3, 1.0)
    quotients = torch.from_numpy(result.values.numpy() / np.float32(3)).to(grad_dtype)
    assert bits(grad) == bits(Sparse(result.indices, quotients, 8).to_dense())
    assert residual.tolist() == [1, 2, 3, 4, 0, 6, 0.25, 8]  # what rounding took off stays
    _, grad, residual, *_ = run(form, "settle_", grad, residual, empty(8, residual), local, 3, 1.0)
    assert (grad.tolist(), residual.tolist()) == ([0] * 8, [1, 2, 3, 4, 0, 6, 0.25, 8])


@st.composite
def codings(draw):
    """Ascending indices, where they count from, and the bits of each that are sent as they are."""
    lo = draw(st.sampled_from([0, 7, 2**20]))
    width = draw(st.sampled_from([1, 2, 31, 32, 33, 100, 5000, 2**30]))
    offsets = draw(st.sets(st.integers(0, width - 1), min_size=1, max_size=200))
    return torch.tensor(sorted(offsets), dtype=torch.int32) + lo, Run(len(offsets), lo, lo + width)


def words(coded):
    """Room for the low and the high words, with something in it."""
    sizes = coded.low_words, coded.high_words
    return [torch.full((num,), -1, dtype=torch.int32) for num in sizes]


@given(case=codings())
@settings(deadline=None, max_examples=20)  # in the interpreter each takes a sixth of a second
def test_coded_indices_equal_the_reference_and_come_back(form, case):
    indices, coded = case
    check(form, "encode_indices", indices, coded.lo, coded.low_bits, *words(coded))
    low, high = words(coded)
    reference.encode_indices(indices, coded.lo, coded.low_bits, low, high)
    read = run(form, "decode_indices", low, high, coded.lo, coded.low_bits, indices * 0 - 1)[-1]
    assert read.equal(indices)


@pytest.mark.parametrize("density", [0.001, 0.02, 0.3, 1.0])
def test_many_coded_indices_equal_the_reference(form, density):
    n = 40_000
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(1)) < density).nonzero()
    indices = indices.squeeze(1).int() + 9
    coded = Run(len(indices), 9, 9 + n)
    check(form, "encode_indices", indices, coded.lo, coded.low_bits, *words(coded))
    low, high = words(coded)
    reference.encode_indices(indices, coded.lo, coded.low_bits, low, high)
    check(form, "decode_indices", low, high, coded.lo, coded.low_bits, indices * 0 - 1)


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that operations make, views apart."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.num_bytes += out.nbytes
        return out


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_coding_in_triton_takes_a_few_bytes_of_memory_for_an_entry(density):
    coding = pytest.importorskip("oktopk.kernels.coding", reason="it needs triton")
    if os.environ["TRITON_INTERPRET"] == "0":
        pytest.skip("the fake of a device's memory is on the CPU")
    num = 4000
    indices = torch.arange(num, dtype=torch.int32) * int(1 / density)
    coded = Run(num, 0, int(num / density))
    low, high = words(coded)
    for name, args in (
        ("encode_indices", (indices, 0, coded.low_bits, low, high)),
        ("decode_indices", (low, high, 0, coded.low_bits, torch.empty_like(indices))),
    ):
        with Allocated() as allocated:
            getattr(coding, name)(*args)
        assert allocated.num_bytes <= 4 * num, name


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from oktopk.kernels import coding, cuda

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 80, 32)
    get_current_device = get_current_stream = lambda self, device=0: 0

triton.runtime.driver.set_active(Driver())
f, i = torch.zeros(9), torch.zeros(9, dtype=torch.int32)
half, long, flag = f.half(), i.long(), i.to(torch.int8)
for kernel, *args in [
    (cuda._count, f, f, i),
    (cuda._add_count, f, half, f, f, i),
    (cuda._write, flag, flag, f, long, i, f, 7),
    (cuda._count_digits, long, 1 << 40, 8, i, torch.iinfo(torch.int64).max, cuda.RADIX),
    (cuda._add_part, f, flag, i, f, 0),
    (cuda._scatter, half, i, half),
    (cuda._take_common, f, i, 9, 4, i, f),
    (coding._encode_low, i, 0, 5, 8, 9, i),
    (coding._encode_high, i, 0, 5, i),
    (coding._count_ones, i, i),
    (coding._decode, i, i, i, i, 0, 5, 9, 9, i),
]:
    module = coding if kernel.__module__.endswith("coding") else cuda
    more = dict(BLOCK=module.BLOCK, grid=(1,), **module.OPTIONS)
    assert kernel.warmup(*args, 9, **more).asm["cubin"]
"""


def test_the_triton_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter takes what the compiler refuses; the compiler needs no GPU."""
    pytest.importorskip("triton", reason="the cuda kernels need triton")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-W", "error", "-c", COMPILE], check=True, env=env)
