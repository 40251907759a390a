# SPDX-License-Identifier: Apache-2.0
"""The bench runs, its bytes are right, and it leaves nothing behind. Times are not tested."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from oktopk.cli import parser
from oktopk.lab.bench.bench import command
from oktopk.lab.bench.measure import CASES, MODELS, Row, compared, gradients, shapes_of
from oktopk.lab.bench.worker import Compressed, rows_of, scaled
from oktopk.launch import network
from oktopk.methods import METHODS, break_even, cheapest
from oktopk.methods.base import KernelSpeed, Link, Work
from oktopk.settings import LOCAL_EVERY
from oktopk.utils.arguments import UsageError
from oktopk.wire import entry_bits

permitted = pytest.mark.skipif(network._unshare() is None, reason=network.why_not())
NUMEL, WORKERS = 40_000, 2


def bench(*more: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "oktopk", "bench", "--workers", str(WORKERS)]
    small = ["--model", str(NUMEL), "--seconds", "0.05"]
    return subprocess.run(
        [*command, *small, *more],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def interfaces() -> str:
    return subprocess.run(["ip", "link"], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("model", "numel", "tensors"),
    [("lstman4", 27_569_568, 40), ("vgg16", 14_728_266, 54), ("bert-base", 133_547_324, 207)],
)
def test_shapes_are_those_of_the_models(model, numel, tensors):
    shapes = MODELS[model]()
    assert (sum(map(math.prod, shapes)), len(shapes)) == (numel, tensors)


def test_a_number_is_a_model_too():
    assert sum(map(math.prod, shapes_of("1e6"))) == 1_000_000
    assert sum(map(math.prod, shapes_of("10007"))) == 10_007
    with pytest.raises(ValueError, match="--model is one of lstman4"):
        shapes_of("resnet")


def test_ranks_share_large_entries_but_not_all():
    a, b = (gradients([20_000, 20_000], rank, 1)[0] for rank in (0, 1))
    tops = [set(x.abs().topk(800).indices.tolist()) for x in (a, b)]
    assert 100 < len(tops[0] & tops[1]) < 700
    assert a.equal(gradients([20_000, 20_000], 0, 1)[0])


def row(method: str, ms: float) -> Row:
    return Row(
        method=method,
        rate="none",
        workers=2,
        numel=10,
        density=0.1,
        steps=3,
        ms_per_step=ms,
        ms_low=ms,
        ms_high=ms,
    )


def test_ratios_are_of_times_above_the_noop():
    rows = [row("noop", 10), row("ddp_dense", 110)]
    found = compared(row("oktopk", 35), rows)
    assert (found.ms_above_noop, found.ratio_to_dense) == (25, 0.25)
    assert compared(rows[0], []).ratio_to_dense is None


@permitted
def test_every_case_in_namespaces(tmp_path):
    before = interfaces()
    done = bench(
        "--rates", "none,500mbit", "--json", f"{tmp_path}/b.json", "--plot", f"{tmp_path}/b.png"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert interfaces() == before
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [r["method"] for r in rows] == [*CASES] * 2
    assert {r["rate"] for r in rows} == {"none", "500mbit"}
    for r in rows:
        assert r["numel"] == NUMEL and r["workers"] == WORKERS and r["ms_per_step"] > 0
        # each step has headers and acknowledgements of TCP beside it
        assert r["bytes_sent"] <= r["bytes_on_interface"] <= 1.1 * r["bytes_sent"] + 20_000
    sent = {r["method"]: r["bytes_sent"] for r in rows}
    assert sent["noop"] == 0
    assert sent["ddp_dense"] == sent["dense"] == 4 * NUMEL == 2 * sent["ddp_fp16"]
    assert sent["oktopk"] < 0.1 * sent["ddp_dense"] == 0.1 * sent["diloco"]
    assert 0 < sent["sparseloco"] < 0.1 * sent["ddp_dense"] > sent["local_steps"] > 0
    assert {r["every"] for r in rows} == {1, LOCAL_EVERY}
    assert (tmp_path / "b.png").stat().st_size > 5_000


@pytest.mark.slow
def test_without_namespaces_it_falls_back(tmp_path):
    """An empty PATH has no `unshare`."""
    done = bench("--methods", "oktopk", "--json", f"{tmp_path}/b.json", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [r["method"] for r in rows] == ["noop", "ddp_dense", "oktopk"]
    assert {r["rate"] for r in rows} == {"none"} and "cannot be shaped" in done.stdout
    assert "unshare, ip, tc not found" in done.stderr and "loopback" in done.stderr


def test_misuse_is_told_at_once():
    done = bench("--methods", "zip")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "oktopk bench: --methods: there is no 'zip': it is one of" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--rates", "fast"), "'fast' is not a rate: write 1gbit"),
        (("--rates", "1kkbit"), "'1kkbit' is not a rate: write 1gbit"),
        (("--rates", "0bit"), "a rate is from 1kbit to 1tbit, got '0bit'"),
        (("--model", "resnet"), "--model is one of"),
        (("--model", "inf"), "--model is one of"),
        (("--density", "0"), "--density must be in"),
        (("--json", "/"), "/ is a folder"),
        (("--simulate", "1"), "--simulate needs 2"),
        (("--advise", "--json", "b.json"), "for measurements"),
    ],
)
def test_flags_that_cannot_be(flags, says):
    with pytest.raises(UsageError, match=says):
        command(parser([]).parse_args(["bench", *flags]), [])


def test_everything_kept_is_a_cost_too():
    everything = Work(1000, 1000, 8)
    assert everything.sparse_bytes(1000) == 8000 and everything.union == 1000
    assert next(iter(cheapest(everything, LINK, SPEED))) == "dense"
    assert entry_bits("bf16", 0.02) == pytest.approx(23.6, abs=0.05)


@pytest.mark.slow
@permitted
def test_nothing_is_left_after_an_interrupt():
    before = interfaces()
    command = [sys.executable, "-m", "oktopk", "bench", "--workers", "2", "--model", "1e5"]
    process = subprocess.Popen(
        [*command, "--seconds", "20"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "noop" in line and "ms/step" not in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    time.sleep(0.2)
    assert interfaces() == before


@pytest.mark.slow
def test_advice_tells_times_and_where_they_cross():
    done = bench("--advise", "--loopback", "--model-size", "2e6", "--step-ms", "50")
    assert done.returncode == 0, done.stderr
    assert "2 workers, 2,000,000 gradients, density 0.02, 50 ms of compute" in done.stdout
    assert "1gbit" in done.stdout and "oktopk" in done.stdout and "below" in done.stdout


@pytest.mark.slow
def test_simulated_ranks_are_told_and_the_formula_goes_beyond():
    done = bench("--simulate", "32", "--loopback")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line[:8].strip().isdigit()]
    assert [int(line[0]) for line in lines] == [2, 4, 8, 16, 32]
    assert not scaled("oktopk", 512, Compressed(10**7, 0.02), LINK, SPEED).simulated
    assert "measured here with 2 workers" in done.stdout


LINK, SPEED = Link(1e-4, 25e6), KernelSpeed(1e-9, 5e-9)  # 200 Mbit/s


def test_costs_know_when_which_method_wins():
    work = Work(27_600_000, 552_000, 8)
    assert next(iter(cheapest(work, LINK, SPEED))) == "oktopk"
    assert next(iter(cheapest(Work(27_600_000, 552_000, 2), LINK, SPEED))) in ("topka", "oktopk")
    assert next(iter(cheapest(work, Link(1e-5, 100e9), SPEED))) == "dense"
    edge = break_even("oktopk", work, LINK.latency, SPEED)
    times = [
        [
            METHODS[name].cost(work).seconds(Link(LINK.latency, edge * factor), SPEED)
            for name in ("oktopk", "dense")
        ]
        for factor in (0.9, 1.1)
    ]
    assert times[0][0] < times[0][1] and times[1][0] > times[1][1]


@pytest.mark.parametrize("P", [4, 32])
@pytest.mark.parametrize("method", ["topka", "oktopk"])
@pytest.mark.parametrize("wire", ["bf16", "int4"])
def test_simulation_and_formula_agree(method, P, wire):
    numel = 2_000_000
    told = scaled(method, P, Compressed(numel, 0.02, wire), LINK, SPEED)
    formula = METHODS[method].cost(Work(numel, 40_000, P, wire)).sent
    assert told.simulated
    # messages of the smaller, simulated gradient have more blocks that are not full
    assert told.bytes_sent == pytest.approx(formula, rel=0.1 if wire == "bf16" else 0.15)


def test_the_all_gather_of_sparseloco_grows_with_the_ranks_and_local_steps_do_not():
    given = Compressed(2_000_000, 0.02), LINK, SPEED, 32
    few, many = ({row.method: row for row in rows_of(P, *given)} for P in (4, 32))
    each = 14 / 8 * 40_000
    assert few["sparseloco"].bytes_sent == pytest.approx(3 * each / 32, rel=0.01)
    assert many["sparseloco"].bytes_sent == pytest.approx(31 * each / 32, rel=0.01)
    assert many["local_steps"].bytes_sent < 1.5 * few["local_steps"].bytes_sent
    assert many["local_steps"].bytes_sent * 32 < many["oktopk"].bytes_sent
