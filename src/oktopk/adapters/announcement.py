# SPDX-License-Identifier: Apache-2.0
"""What attaching tells whoever started the run: what will happen, at what cost."""

from __future__ import annotations

from typing import Any

from oktopk.adapters.driver import GradientDriver
from oktopk.adapters.local_driver import OuterOptions
from oktopk.adapters.parameters import ParameterLayout
from oktopk.comm.communicator import dense_allreduce
from oktopk.methods import METHODS
from oktopk.methods.base import Work
from oktopk.optim.presets import PLAIN, changes_for, name_of, warn_if_short, warn_if_unknown
from oktopk.settings import Settings, num_kept
from oktopk.sparse import common_acc_dtype
from oktopk.utils.arguments import format_bytes
from oktopk.utils.console import announce


def tell(driver: GradientDriver[Any], total_steps: int | None, *, verbose: bool) -> None:
    """Warn of what is likely a mistake, and announce what will happen. For rank 0."""
    settings, optimizer = driver.engine.settings, driver.scaling.optimizer
    warn_if_unknown(settings, optimizer)
    if total_steps is not None and settings.method != "dense":
        warn_if_short(settings, total_steps)
    if verbose:
        replicas, shards = driver.comm.size, driver.engine.shards.size
        is_auto = driver.budget is not None
        announce(describe_run(settings, driver.parameters, replicas, optimizer, shards, is_auto))


def tell_resumed(driver: GradientDriver[Any]) -> None:
    """Announce on rank 0 where a run continues: `attach` has described one from its start."""
    if driver.verbose and driver.rank == 0:
        step, settings = driver.engine.step, driver.engine.settings
        announce(f"the state of step {step:,} was loaded: {describe_phase(settings, step)}")


def describe_phase(settings: Settings, step: int) -> str:
    """The phase that a run continues in after so many steps, and when the next ones begin."""
    if settings.method == "dense":
        return "every step is dense"
    final, full = f"{100 * settings.density:.3g} %", settings.warmup_steps + settings.falling_steps
    if settings.is_dense(step):
        dense = f"the dense phase continues until step {settings.warmup_steps:,}"
        return f"{dense}; density {final} from step {full:,} on"
    now = f"{100 * settings.density_at(step):.3g} %"
    rest = f", {final} from step {full:,} on" if step < full else ""
    return f"the sparse phase continues at density {now}{rest}"


def describe_loaded(exchanges: int, left: int) -> str:
    """Where a run of local steps continues, `left` optimizer steps before its next exchange."""
    return (
        f"the state after {exchanges:,} exchange{'s' * (exchanges != 1)} was loaded: the next one "
        f"is in {left} optimizer step{'s' * (left != 1)}"
    )


def describe_adopted(exchange: int, names: str) -> str:
    """That an exchange of local steps goes on from weights that were loaded."""
    return (
        f"exchange {exchange}: the weights that were written to {names}, the same on all ranks, "
        "are the new starting point; what was unsent of the old ones is dropped"
    )


def describe_run(
    settings: Settings,
    parameters: ParameterLayout,
    replicas: int,
    optimizer: Any,
    shards: int = 1,
    is_auto: bool = False,
) -> str:
    """One line: phases, bytes, and what is done for the optimizer.

    `shards` ranks divide each of the `replicas` of the gradient among them. The bytes are those
    that go to other replicas.
    """
    numel = sum(p.numel() for p in parameters.parameters.values())
    begin = f"method {settings.method}, {_world(replicas, shards)}, {numel:,} gradients"
    if settings.method == "dense":
        return f"{begin}: every step is dense"
    cost = _bytes(settings, parameters, replicas, shards)
    return (
        f"{begin}: {_phases(settings, is_auto)}; {cost}; {describe_optimizer(settings, optimizer)}"
    )


def describe_local_steps(
    settings: Settings,
    parameters: ParameterLayout,
    replicas: int,
    shards: int,
    options: OuterOptions,
    is_auto: bool,
) -> str:
    """One line: what is exchanged how often, and the bytes."""
    numel, every = sum(p.numel() for p in parameters.parameters.values()), options.every
    begin = f"local steps, {_world(replicas, shards)}, {numel:,} parameters"
    rounds = "after every step" if every == 1 else f"every {every} steps"
    rounds += f" in {options.fragments} fragments" if options.fragments > 1 else ""
    rounds += f", applied {options.delay} steps later" if options.delay else ""
    if settings.method == "dense" or settings.density == 1:
        return f"{begin}: all weight changes are exchanged {rounds}"
    kept = f"{100 * settings.density:.3g} %"
    kept = f"auto, at first {kept}," if is_auto else kept
    share = f"{100 * settings.rank_density(settings.density):.3g} % from each rank"
    exchange, dense = expected_bytes(settings, parameters, replicas, shards, options.fragments)
    if not dense:
        return f"{begin}: there is nothing to send"
    sent = exchange / every
    return (
        f"{begin}: density {kept} {rounds}, {share} by {settings.method} as {settings.wire}; "
        f"about {format_bytes(sent)} per rank and step instead of {format_bytes(dense)} "
        f"({_percent(sent, dense)})"
    )


def describe_buffers(nbytes: int, replicas: int, every: int) -> str:
    """What float buffers of so many bytes add to the bytes that are announced."""
    sent = dense_allreduce(nbytes, replicas).sent / every
    return f"; float buffers that change add at most {format_bytes(sent)}" if sent else ""


def _percent(sent: float, dense: float) -> str:
    share = 100 * sent / dense
    return f"{share:.2g} %" if share < 10 else f"{share:.0f} %"


def describe_optimizer(settings: Settings, optimizer: Any) -> str:
    """What is done for the optimizer, or changed in it."""
    if optimizer is None:
        return f"{PLAIN}, as no optimizer is known (pass optimizer=...)"
    return f"for {name_of(optimizer)}: {', '.join(changes_for(settings)) or PLAIN}"


def expected_bytes(
    settings: Settings,
    parameters: ParameterLayout,
    replicas: int,
    shards: int = 1,
    fragments: int = 1,
) -> tuple[float, float]:
    """What a rank will send in a step at the final density, and what a dense step sends.

    With `fragments` a step is one exchange of each. Headers are not in it.
    """
    trained = parameters.parameters
    numel = sum(p.numel() for p in trained.values())
    num_dense = sum(trained[name].numel() for name in parameters.dense)
    itemsize = max((p.element_size() for p in trained.values()), default=4)
    ring = 2 * (replicas - 1) / replicas / shards
    density = settings.rank_density(settings.density)
    parts = shards * fragments
    work = Work(
        (numel - num_dense) // parts,
        num_kept(numel - num_dense, density) // parts,
        replicas,
        settings.wire,
        common_acc_dtype(trained.values()),
        num_dense // parts,
        settings.short_bytes,
    )
    return fragments * METHODS[settings.method].cost(work).sent, ring * numel * itemsize


def _bytes(settings: Settings, parameters: ParameterLayout, replicas: int, shards: int) -> str:
    sent, dense = expected_bytes(settings, parameters, replicas, shards)
    if not dense:
        return "there is nothing to send"
    where = " to other replicas" if shards > 1 else ""
    return (
        f"a step will then send about {format_bytes(sent)} per rank{where} instead of "
        f"{format_bytes(dense)} ({_percent(sent, dense)})"
    )


def _world(replicas: int, shards: int) -> str:
    """`world size 4 (2 replicas of 2 ranks each)`."""
    size = f"world size {replicas * shards}"
    return size if shards == 1 else f"{size} ({replicas} replicas of {shards} ranks each)"


def _steps(number: int, kind: str = "") -> str:
    return f"{number} {kind}step{'s' * (number != 1)}"


def _phases(settings: Settings, is_auto: bool) -> str:
    """`128 dense steps, 256 in which the density falls from 25 % to 2 %, then 2 %`."""
    final = f"{100 * settings.density:.3g} %"
    phases = [_steps(settings.warmup_steps, "dense ")] if settings.warmup_steps else []
    if settings.schedule:
        first = f"{100 * settings.schedule[0][1]:.3g} %"
        falling = str(settings.falling_steps) if phases else _steps(settings.falling_steps)
        phases.append(f"{falling} in which the density falls from {first} to {final}")
    rest = f"density auto, at first {final}" if is_auto else f"density {final}"
    return ", ".join([*phases, f"then {rest}" if phases else rest])
