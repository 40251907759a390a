# SPDX-License-Identifier: Apache-2.0
"""`Exchange`: what the training loop needs of the way in which ranks exchange what they learn.

`Attached` is `oktopk.attach` on a DDP model, `LocalStepsExchange` is `oktopk.local_steps` on the
bare model, and `BaselineExchange` is one of the baselines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from inspect import signature
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import oktopk
from oktopk.adapters.ddp_handle import Handle
from oktopk.adapters.local_handle import LocalSteps
from oktopk.errors import RunError
from oktopk.lab.baselines.base import MOST_WARMUP, WARMUP_SHARE, BaselineOptions, dense_stats
from oktopk.lab.baselines.local import BASELINES
from oktopk.lab.tasks.base import AUTO
from oktopk.lab.train.config import LOCAL_STEPS, Config, preset_options
from oktopk.stats import StepStats

# Each rank keeps the batch-norm statistics of its own batches, and validation averages them.
# torch 2.13 renamed the argument.
_NAMES = signature(DistributedDataParallel.__init__).parameters
_OWN = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"

State = dict[str, Any]


class Exchange(ABC):
    """A module to call, an optimizer to step, and what became of each step."""

    module: nn.Module
    """Called in the forward pass."""

    optimizer: Optimizer
    handle: Handle | None = None
    """Of `oktopk.attach`; None for any other exchange."""

    shares_optimizer = True
    """Whether the optimizer's state is the same on all ranks."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[object]:
        """A context for backward passes whose gradients are not exchanged yet."""

    @abstractmethod
    def after_backward(self) -> bool:
        """Called once per step, when backward has returned. Whether the step is to be skipped."""

    @abstractmethod
    def finish_step(self) -> StepStats:
        """Called once per step, after `optimizer.step()`."""

    @property
    @abstractmethod
    def waits(self) -> dict[str, float]:
        """Seconds that the last step waited for the exchange, by the part of the step."""

    @property
    @abstractmethod
    def settings(self) -> State:
        """The settings of the exchange, for the record of the run."""

    @property
    def weights_agree(self) -> bool:
        """Whether all ranks have the same weights now."""
        return True

    @property
    def exchanged(self) -> bool:
        """Whether the last step exchanged anything."""
        return True

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Gradients that were not exchanged yet, by parameter."""
        return {}

    @property
    def message_sizes(self) -> dict[str, dict[int, int]]:
        """Messages sent, by stage and by the bit length of their size."""
        return {}

    @property
    def failure(self) -> BaseException | None:
        """Why the exchange failed, if it did."""
        return None

    def state_dict(self) -> State | None:
        """What a bit-exact resume needs; None if the exchange cannot be resumed."""
        return None

    def load_state_dict(self, state: State | list[State]) -> None:
        """Take over a state, or the states of all ranks of another world size."""
        raise NotImplementedError(f"{type(self).__name__} cannot be resumed")

    def close(self) -> None:  # noqa: B027 - a baseline has nothing to close
        """End the exchange."""


class Attached(Exchange):
    """`oktopk.attach` on a DDP model."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Optimizer, handle: Handle) -> None:
        self.module, self.optimizer, self._ddp = ddp, optimizer, ddp
        self.handle = self._handle = handle

    def no_sync(self) -> AbstractContextManager[object]:
        return self._ddp.no_sync()

    def after_backward(self) -> bool:
        return self._stats.skipped

    def finish_step(self) -> StepStats:
        return self._stats

    @property
    def _stats(self) -> StepStats:
        assert self._handle.stats is not None, "backward has not been called"
        return self._handle.stats

    @property
    def waits(self) -> dict[str, float]:
        return {"backward": self._stats.exposed}

    @property
    def settings(self) -> State:
        return asdict(self._handle.settings)

    @property
    def residuals(self) -> dict[str, Tensor]:
        return self._handle.residuals

    @property
    def message_sizes(self) -> dict[str, dict[int, int]]:
        return {stage: dict(sizes) for stage, sizes in self._handle.comm.ledger.sizes.items()}

    @property
    def failure(self) -> BaseException | None:
        return self._handle.failure

    def state_dict(self) -> State | None:
        return self._handle.state_dict()

    def load_state_dict(self, state: State | list[State]) -> None:
        self._handle.load_state_dict(state)

    def close(self) -> None:
        self._handle.close()


class LocalStepsExchange(Exchange):
    """`oktopk.local_steps` on the bare model: the exchange happens in `optimizer.step()`, or with a
    delay beside the steps after it."""

    shares_optimizer = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        handle: LocalSteps,
        density: float | Literal["auto"],
    ) -> None:
        self.module, self.optimizer, self._outer = model, optimizer, handle
        self._density = density
        """What all ranks together deliver, as the config has it."""

        self._numel = sum(p.numel() for p in model.parameters())
        self._rounds = self._step = 0
        self._last: StepStats | None = None
        """Of the exchange in the last step; None if there was none."""

    def no_sync(self) -> AbstractContextManager[object]:
        return nullcontext()

    def after_backward(self) -> bool:
        return False

    def finish_step(self) -> StepStats:
        exchanged = self._outer.step != self._rounds
        self._last = self._outer.stats if exchanged else None
        self._rounds = self._outer.step
        stats = no_exchange(self._step, self._numel, self._outer.comm.size)
        if self._last is not None:  # of a fragment, and reported as of the model
            dense = {"numel": stats.numel, "bytes_dense": stats.bytes_dense}
            stats = replace(self._last, step=self._step, **dense)
        self._step += 1
        return stats

    @property
    def waits(self) -> dict[str, float]:
        return {"optimizer": self._last.exposed} if self._last is not None else {}

    @property
    def weights_agree(self) -> bool:
        drivers = self._outer.drivers
        return all(each.local_steps == 0 and each.in_flight is None for each in drivers)

    @property
    def exchanged(self) -> bool:
        return self._last is not None

    @property
    def settings(self) -> State:
        options = self._outer.driver.options
        own = {name: getattr(options, name) for name in ("every", "delay", "fragments")}
        own |= {"method": LOCAL_STEPS, "density": self._density}
        return asdict(self._outer.settings) | own

    @property
    def residuals(self) -> dict[str, Tensor]:
        return self._outer.residuals

    @property
    def message_sizes(self) -> dict[str, dict[int, int]]:
        return {stage: dict(sizes) for stage, sizes in self._outer.comm.ledger.sizes.items()}

    @property
    def failure(self) -> BaseException | None:
        return self._outer.failure

    def state_dict(self) -> State | None:
        return {"outer": self._outer.state_dict(), "step": self._step}

    def load_state_dict(self, state: State | list[State]) -> None:
        states = state if isinstance(state, list) else [state]
        outer = [one["outer"] for one in states]
        self._outer.load_state_dict(outer if isinstance(state, list) else outer[0])
        self._step, self._rounds = states[0]["step"], self._outer.step

    def close(self) -> None:
        self._outer.close()


class BaselineExchange(Exchange):
    """One of the baselines. It has no residuals that reports know, and cannot be resumed."""

    def __init__(
        self, name: str, model: nn.Module, optimizer: Optimizer, options: BaselineOptions
    ) -> None:
        self._name = name
        self._baseline = BASELINES[name](model, optimizer, options)
        self.module, self.optimizer = self._baseline.module, self._baseline.optimizer

    def no_sync(self) -> AbstractContextManager[object]:
        return self._baseline.no_sync()

    def after_backward(self) -> bool:
        self._baseline.after_backward()
        return False

    def finish_step(self) -> StepStats:
        return self._baseline.finish_step()

    @property
    def waits(self) -> dict[str, float]:
        return self._baseline.waits

    @property
    def weights_agree(self) -> bool:
        return self._baseline.weights_agree

    @property
    def settings(self) -> State:
        return {"method": self._name} | self._baseline.settings


def make_exchange(
    config: Config, model: nn.Module, optimizer: Optimizer, world_size: int, total_steps: int
) -> Exchange:
    """The exchange that the config asks for. Every rank starts with the weights of rank 0."""
    device = next(model.parameters()).device
    arguments: dict[str, Any] = {
        "device_ids": [device.index] if device.type == "cuda" else None,
        "gradient_as_bucket_view": True,
        _OWN: False,
    }
    if config.method in BASELINES:
        options = BaselineOptions(
            world_size=world_size,
            warmup_steps=baseline_warmup(config, total_steps),
            every=config.every,
            density=config.density,  # pyright: ignore[reportArgumentType] - checked by the config
            ddp_arguments=arguments,
        )
        return BaselineExchange(config.method, model, optimizer, options)
    if config.method == LOCAL_STEPS:
        if config.delay and device.type == "cuda":
            raise RunError(
                f"delay = {config.delay} does not work on CUDA here: the collectives of metrics "
                "and validation would run beside those of the exchange, in no order; use delay = 0"
            )
        outer = oktopk.local_steps(
            model,
            optimizer,
            every=config.every,
            delay=config.delay,
            fragments=config.fragments,
            density=config.density,
            wire=_codec(config),
            exact_every=config.exact_every,
            bounds_every=config.bounds_every,
            timeout=config.timeout,
        )
        return LocalStepsExchange(model, optimizer, outer, config.density)
    ddp = DistributedDataParallel(model, **arguments)
    handle = oktopk.attach(
        ddp, optimizer=optimizer, total_steps=total_steps, **exchange_options(config)
    )
    return Attached(ddp, optimizer, handle)


def no_exchange(step: int, numel: int, world_size: int) -> StepStats:
    """What a step between two exchanges did: it sent nothing."""
    return replace(dense_stats(step, numel, world_size, 0), phase="sparse", k=0, local=0, result=0)


def _codec(config: Config) -> Any:
    """The codec that the config asks for; None where the run, or the default, decides."""
    return None if config.wire == AUTO else config.wire


def baseline_warmup(config: Config, total_steps: int) -> int:
    """The dense steps at first of a baseline that has them."""
    if config.warmup_steps == AUTO:
        return min(MOST_WARMUP, round(WARMUP_SHARE * total_steps))
    return config.warmup_steps


def exchange_options(config: Config) -> dict[str, Any]:
    """The arguments of `attach` that the config decides."""
    same_names = ("method", "density", "exact_every", "bounds_every", "group_numel", "scope")
    options = {name: getattr(config, name) for name in (*same_names, "timeout")}
    for name in ("warmup_steps", "ramp_steps"):
        steps = getattr(config, name)
        options[name] = None if steps == AUTO else steps
    return (
        options
        | preset_options(config.preset, config.overrides)
        | {"clip_before": config.clip_before or None, "wire": _codec(config)}
    )
