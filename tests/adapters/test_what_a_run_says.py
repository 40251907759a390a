# SPDX-License-Identifier: Apache-2.0
"""What `attach` tells people, what it chooses by itself, and an optimizer that is bound later."""

from __future__ import annotations

import io
import logging
from contextlib import contextmanager, redirect_stderr

import pytest
import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, RMSprop

import oktopk
import sites
from idioms import Net, batch, weights_of
from oktopk.adapters.announcement import expected_bytes
from oktopk.adapters.parameters import ParameterLayout
from oktopk.optim.presets import default_ramp, default_warmup
from oktopk.optim.staleness import steps_taken


@contextmanager
def fresh_logging(level: int = logging.NOTSET, handler: logging.Handler | None = None):
    """The logger as in a program that has not configured logging, but for what is given."""
    log = logging.getLogger("oktopk")
    root, before = logging.getLogger(), (log.level, log.handlers, log.disabled)
    handlers, root.handlers = root.handlers, []
    log.level, log.handlers, log.disabled = level, [handler] if handler else [], False
    log.manager._clear_cache()
    try:
        yield
    finally:
        log.level, log.handlers, log.disabled = before
        root.handlers = handlers
        log.manager._clear_cache()


def said(group, kind: str) -> tuple[str, list[str]]:
    """What a run of four steps writes to stderr, and what it logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    configured = {
        "unconfigured": {},
        "configured": {"level": logging.INFO, "handler": handler},
        "quiet": {},
        "silenced": {"level": logging.WARNING, "handler": handler},
    }[kind]
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = AdamW(model.parameters())
    with fresh_logging(**configured), redirect_stderr(io.StringIO()) as stderr:
        more = {"verbose": False} if kind == "quiet" else {}
        handle = oktopk.attach(model, optimizer=optimizer, warmup_steps=2, ramp_steps=1, **more)
        for step in range(4):
            one_step(group, model, optimizer, step)
        handle.close()
    return stderr.getvalue(), lines


def one_step(group, model, optimizer, step: int) -> None:
    x, y = batch(torch.distributed.get_rank(group), step)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_program_without_logging_sees_two_lines_on_rank_0(worlds):
    (stderr, logged), (other, _) = worlds.run(2, said, "unconfigured")
    first, second = stderr.splitlines()
    assert first.startswith("oktopk: method oktopk, world size 2, 8,405 gradients: 2 dense steps, ")
    assert "1 in which the density falls from 25 % to 20 %, then density 20 %" in first
    assert " per rank instead of 33.6 kB (" in first
    assert "for AdamW: second moments are corrected for gradients that arrive late" in first
    assert second.startswith("oktopk: step 2: the sparse phase begins")
    assert other == "" and logged == []


def test_a_program_with_logging_sees_them_once(worlds):
    (stderr, logged), (other, others) = worlds.run(2, said, "configured")
    assert stderr == "" and len(logged) == 2
    assert other == "" and others == []


@pytest.mark.parametrize("kind", ["quiet", "silenced"])
def test_whoever_asks_for_silence_gets_it(worlds, kind):
    assert worlds.run(2, said, kind) == [("", [])] * 2


def said_by_two_sites(group, kind: str, verbose: bool) -> str:
    with fresh_logging(), redirect_stderr(io.StringIO()) as stderr:
        if kind == "fsdp":
            site = sites.build(2, {"warmup_steps": 1, "verbose": verbose}, AdamW, preset=True)
            for step in range(2):
                sites.one_step(site, step)
            site.handle.close()
        else:
            model = DistributedDataParallel(Net(), process_group=group)
            optimizer = AdamW(model.parameters())
            inside = [torch.distributed.new_group([start, start + 1]) for start in (0, 2)]
            how = {"local_group": inside[torch.distributed.get_rank() // 2], "verbose": verbose}
            handle = oktopk.attach(model, optimizer=optimizer, warmup_steps=1, **how)
            for step in range(2):
                one_step(group, model, optimizer, step)
            handle.close()
    return stderr.getvalue()


@pytest.mark.parametrize("kind", ["fsdp", "nodes"])
def test_two_sites_of_two_ranks_are_announced_as_such(worlds, kind):
    first, *others = worlds.run(4, said_by_two_sites, kind, True)
    start, sparse = first.splitlines()
    assert "method oktopk, world size 4 (2 replicas of 2 ranks each), " in start
    assert " per rank to other replicas instead of " in start
    assert "for AdamW" in start and "step 1: the sparse phase begins" in sparse
    assert others == [""] * 3
    assert worlds.run(4, said_by_two_sites, kind, False) == [""] * 4


def resumed(group, kind: str, steps: int) -> tuple[str, list[str]]:
    """What a second run says and logs that continues after so many steps of a first one."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    model = DistributedDataParallel(Net(), process_group=group)
    momentum = SGD(model.parameters(), 0.01, momentum=0.9)
    optimizer = momentum if kind == "sgd" else AdamW(model.parameters())
    how = {"warmup_steps": 2, "ramp_steps": 4, "density": 0.02, "optimizer": optimizer}
    handle = oktopk.attach(model, verbose=False, **how)
    for step in range(steps):
        one_step(group, model, optimizer, step)
    state = handle.state_dict()
    handle.close()
    if kind == "new":
        optimizer = how["optimizer"] = AdamW(model.parameters())
    with fresh_logging(handler=handler), redirect_stderr(io.StringIO()) as stderr:
        handle = oktopk.attach(model, **how)
        if kind == "loaded":
            handle.load_state_dict(state)
        for step in range(2):
            one_step(group, model, optimizer, step)
        handle.close()
    return stderr.getvalue(), lines


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        (1, "the dense phase continues until step 2; density 2 % from step 6 on"),
        (3, "the sparse phase continues at density 13.3 %, 2 % from step 6 on"),
        (7, "the sparse phase continues at density 2 %"),
    ],
)
def test_a_resumed_run_says_where_it_continues(worlds, steps, phase):
    (first, logged), (other, others) = worlds.run(2, resumed, "loaded", steps)
    start, continues, *_ = first.splitlines()
    assert start.startswith("oktopk: method oktopk, world size 2, ")
    assert continues == f"oktopk: the state of step {steps} was loaded: {phase}"
    assert (other, logged, others) == ("", [], [])


@pytest.mark.parametrize("fragments", [1, 2])
def test_loaded_local_steps_say_where_they_continue(fragments):
    how = {"every": 4, "fragments": fragments}
    states = []
    for steps in (5, 0):
        model = Net()
        optimizer = SGD(model.parameters(), 0.01)
        with redirect_stderr(io.StringIO()) as stderr:
            outer = oktopk.local_steps(model, optimizer, **how)
            for state in states:
                outer.load_state_dict(state)
        for _ in range(steps):
            optimizer.step()
        states.append(outer.state_dict())
        outer.close()
    said = {
        1: "the state after 1 exchange was loaded: the next one is in 3 optimizer steps",
        2: "the state after 2 exchanges was loaded: the next one is in 1 optimizer step",
    }
    assert stderr.getvalue().splitlines()[-1] == f"oktopk: {said[fragments]}"


@pytest.mark.parametrize(("kind", "taken"), [("forgotten", "3 steps"), ("sgd", "steps")])
def test_an_optimizer_that_continues_without_a_state_is_a_warning(worlds, kind, taken):
    (_, logged), (_, others) = worlds.run(2, resumed, kind, 3)
    (told,) = logged
    assert told.startswith(f"the optimizer has already taken {taken}, and no state of oktopk was")
    assert told.endswith("on every rank: handle.load(folder), or handle.load_state_dict(state)")
    assert others == []


def test_a_new_optimizer_is_no_warning(worlds):
    assert [logged for _, logged in worlds.run(2, resumed, "new", 3)] == [[], []]


def test_a_state_of_zeros_is_that_of_a_new_optimizer():
    """As Adagrad begins with one, and as torch.distributed.checkpoint makes one to load into."""
    parameter = torch.nn.Parameter(torch.ones(3))
    for optimizer in (Adagrad([parameter]), AdamW([parameter]), SGD([parameter], 0.1)):
        assert steps_taken(optimizer) == 0
    _init_optim_state(optimizer := AdamW([parameter]))
    assert optimizer.state and steps_taken(optimizer) == 0
    parameter.grad = torch.ones(3)
    for _ in range(2):
        optimizer.step()
    assert steps_taken(optimizer) == 3  # torch counts the one that made the state


class Flat(torch.nn.Module):
    """Its gradients are what it is given: those of ranks have nothing in common."""

    def __init__(self, numel: int, num_dense: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel // 64, 64))
        self.bias = torch.nn.Parameter(torch.zeros(num_dense))  # travels dense

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        grads = (torch.randn(p.shape, generator=generator) for p in self.parameters())
        return sum(((p * g).sum() for p, g in zip(self.parameters(), grads, strict=True)))


SENT = [  # entries that travel sparse and dense, density, codec
    (131_072, 256, 0.02, "bf16"),
    (131_072, 4096, 0.02, "int4"),
    (8192, 64, 0.02, "bf16"),
    (8192, 64, 0.2, "plain"),
    (2**20, 2048, 0.01, "bf16"),
]


def sent(group, method: str) -> list[tuple[float, float, int, int]]:
    """For each of `SENT`: the bytes that are announced, and those of the last of six steps."""
    found = []
    for numel, num_dense, density, wire in SENT:
        model = DistributedDataParallel(Flat(numel, num_dense), process_group=group)
        how = {"method": method, "density": density, "wire": wire, "verbose": False}
        handle = oktopk.attach(model, warmup_steps=0, **how)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank(group))
        for _ in range(6):
            model(generator).backward()
        stats, size = handle.stats, handle.comm.size
        expected = expected_bytes(handle.settings, handle.driver.parameters, size)
        found.append((*expected, stats.bytes_sent - stats.bytes_header, stats.bytes_dense))
        handle.close()
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("method", oktopk.METHODS)
def test_the_bytes_that_are_announced_are_those_that_are_sent(worlds, method, size):
    """The mean of the ranks, headers apart, to 10 %."""
    for case, *rows in zip(SENT, *worlds.run(size, sent, method), strict=True):
        mean = sum(payload for _, _, payload, _ in rows) / size
        for expected, dense, _, bytes_dense in rows:
            assert dense == pytest.approx(bytes_dense, rel=0.01), case
            assert expected == pytest.approx(mean, rel=0.1), case


@pytest.mark.parametrize("fragments", [1, 2])
def test_so_are_those_of_local_steps(fragments):
    """Fragments are so small here that they take the short path, and the model does not."""

    def exchanged(comm) -> tuple[float, float]:
        model, num = torch.nn.Sequential(Flat(2**20, 256), Flat(2**20, 256)), fragments
        optimizer = SGD(model.parameters(), 1.0)
        how = {"method": "oktopk", "density": 0.005, "fragments": num, "average": "all"}
        outer = oktopk.local_steps(model, optimizer, every=2, comm=comm, verbose=False, **how)
        generator = torch.Generator().manual_seed(comm.rank)
        sent = []
        for _ in range(6):
            for _ in range(2):
                optimizer.zero_grad()
                sum(part(generator) for part in model).backward()
                optimizer.step()
            sent.append(comm.ledger.total().payload_sent)
        round_bytes = (sent[-1] - sent[1]) / 4
        parameters = ParameterLayout(dict(model.named_parameters()), oktopk.Policy())
        return expected_bytes(outer.settings, parameters, 3, fragments=num)[0], round_bytes

    rows = oktopk.simulate(3, exchanged)
    mean = sum(payload for _, payload in rows) / 3
    assert rows[0][0] == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    ("asked", "total", "steps"),
    [(None, None, 128), (None, 10**6, 128), (None, 1000, 50), (None, 5, 0), (7, 1000, 7)],
)
def test_the_warm_up_is_a_share_of_a_short_run_unless_it_is_given(asked, total, steps):
    assert default_warmup(asked, total, 0.02) == steps
    assert default_warmup(asked, total, "auto") == steps  # it may become low


@pytest.mark.parametrize(
    ("warmup", "total", "steps"),
    [(128, None, 256), (128, 10**6, 1024), (24, 480, 228), (0, 5, 2), (50, 40, 0)],
)
def test_the_density_falls_for_half_of_a_run_of_known_length(warmup, total, steps):
    assert default_ramp(warmup, total) == steps


@pytest.mark.parametrize(("total", "steps"), [(None, 64), (10**6, 64), (480, 12)])
def test_a_high_density_has_half_of_the_warm_up_unless_one_is_given(total, steps):
    assert default_warmup(None, total, 0.2) == steps
    assert default_warmup(7, total, 0.2) == 7


def bound(group, how: str) -> tuple:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = AdamW(model.parameters(), lr=0.01)
    options = {"warmup_steps": 2, "verbose": False}
    if how == "later":
        handle = oktopk.attach(model, **options).bind(optimizer)
    else:
        handle = oktopk.attach(model, optimizer=optimizer, **options)
    for step in range(12):
        one_step(group, model, optimizer, step)
    settings = handle.settings
    handle.close()
    return settings, weights_of(model)


def test_an_optimizer_that_is_bound_later_makes_no_difference(worlds):
    at_once, later = (worlds.run(2, bound, how) for how in ("at once", "later"))
    for (settings, weights), (other_settings, other_weights) in zip(at_once, later, strict=True):
        assert settings == other_settings
        assert settings.staleness_correction and settings.falling_steps == 4
        for name, value in weights.items():
            assert torch.equal(value, other_weights[name]), name


def bound_badly(group) -> list[str]:
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer, told = AdamW(model.parameters()), []
    handle = oktopk.attach(model, warmup_steps=2, verbose=False)
    for attempt in ("no optimizer", "late", "twice"):
        try:
            if attempt == "no optimizer":
                handle.bind(object())
            elif attempt == "late":
                one_step(group, model, optimizer, 0)
                handle.bind(optimizer)
            else:
                handle.close()
                handle = oktopk.attach(model, optimizer=optimizer, warmup_steps=2, verbose=False)
                handle.bind(optimizer)
        except (TypeError, ValueError) as error:
            told.append(str(error))
    handle.close()
    return told


def test_binding_wrongly_is_named(worlds):
    for rank, (no_optimizer, late, twice) in enumerate(worlds.run(2, bound_badly)):
        assert "expected an optimizer or a scheduler, got object" in no_optimizer
        assert f"rank {rank}: bind was called after 1 steps" in late
        assert "bound to AdamW already" in twice


def bound_on_one_rank(group) -> str:
    model = DistributedDataParallel(Net(), process_group=group)
    optimizer = AdamW(model.parameters())
    handle = oktopk.attach(model, warmup_steps=2, verbose=False, timeout=6)
    if torch.distributed.get_rank(group) == 0:
        handle.bind(optimizer)
    try:
        one_step(group, model, optimizer, 0)
    except RuntimeError:
        return str(handle.failure)
    finally:
        handle.close()
    return "no error"


def test_binding_on_one_rank_alone_is_an_error_on_all(worlds):
    for told in worlds.run(2, bound_on_one_rank):
        assert "staleness_correction is True on rank 0 but False on rank 1" in told


def warned(group) -> str:
    model = DistributedDataParallel(Net(), process_group=group)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    with fresh_logging(handler=handler):
        handle = oktopk.attach(model, warmup_steps=2, verbose=False)
        handle.bind(RMSprop(model.parameters())).close()
    return "\n".join(lines)


def test_an_unknown_optimizer_that_is_bound_is_a_warning(worlds):
    first, other = worlds.run(2, warned)
    assert first.startswith("WARNING for RMSprop: plain error feedback") and other == ""
