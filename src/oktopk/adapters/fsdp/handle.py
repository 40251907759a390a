# SPDX-License-Identifier: Apache-2.0
"""`FSDPHandle`: what `attach_fsdp` returns."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.storage import StorageReader

from oktopk.adapters.announcement import tell_resumed
from oktopk.adapters.fsdp import state as fsdp_state
from oktopk.adapters.fsdp.driver import ShardDriver
from oktopk.adapters.fsdp.modules import refuse_backward
from oktopk.adapters.handle import BaseHandle, Connection
from oktopk.comm.ledger import Traffic
from oktopk.engine.saved_state import Saved, taken_over
from oktopk.errors import ExchangeError, NonfiniteError
from oktopk.optim.staleness import StalenessCorrection

USE_DCP = (
    "save handle.state_dict() with torch.distributed.checkpoint, and load it with "
    "handle.load_checkpoint"
)


class FSDPHandle(BaseHandle[ShardDriver]):
    """The statistics and the state of an attached FSDP model, and a way to detach it.

    Statistics and residuals are those of this rank's shard.
    """

    def __init__(self, driver: ShardDriver, connection: Connection) -> None:
        super().__init__(driver, connection)
        self.failure: BaseException | None = None
        """The error that ended the exchange for good; None while it is well."""

        parameters = driver.parameters
        this = weakref.ref(self)  # the optimizer must not keep a handle alive
        self._staleness = StalenessCorrection(
            driver.scaling.optimizer,
            {name: p for name, p in parameters.parameters.items() if not parameters.is_dense(name)},
            self.settings,
            last=lambda: handle.stats if (handle := this()) else None,
            logs=self._everyone.rank == 0,
        )
        self._backward = -1
        """The number that autograd gave to the backward whose end is awaited; -1 if none is. One
        that raised never ends."""

        self._finalizer = weakref.finalize(self, connection.failure_detector.close)
        for number, module in enumerate(parameters.modules):
            module.hook(partial(self._take, number))

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What this rank sent and received since the start, by axis.

        `replicate` is what goes between sites. `shard` is what the exchange adds inside a site:
        flags and counts. `reduce-scatter` is what FSDP itself sends of gradients inside a site, by
        the formula of a reduce-scatter; its all-gathers of parameters are not counted.
        """
        return super().traffic | {"reduce-scatter": self.driver.reduce_scattered}

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, for `torch.distributed.checkpoint`.

        Residuals are DTensors by name, those of this rank's replica; so are the steps in which
        entries last arrived. It belongs to the weights after `optimizer.step()`. The keys are the
        same at any time, so the state of a fresh handle is a template to load into, on the same
        mesh. `load_checkpoint` loads a checkpoint of any mesh.
        """
        layout = self.driver.parameters
        replica, shard = self.comm.rank, self.driver.shard_comm.rank
        with self.driver.engine.lock.reading():
            text = self._metadata(layout.layout, self.driver.scaling.save())
            residuals = self.driver.copied_residuals()
            arrived = self._staleness.state_dict()
        return {
            "residuals": {str(replica): fsdp_state.as_dtensors(residuals, layout)},
            "arrived": fsdp_state.as_dtensors(arrived, layout),
            "metadata": {fsdp_state.place(replica, shard): text},
        }

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Continue where `state_dict` was taken: the same bits as a run that never stopped.

        On another mesh the residuals must be those that `load_checkpoint` asks for: with R
        replicas, replica r takes over the residuals of replicas r, r+R, ... Every rank must call
        it, and they wait for each other: where one of them refuses its state, all of them raise.
        """
        saved = self._read(state)
        with self.driver.engine.lock.changing():
            self._load_exchange(saved, self.driver.layout)
            self.driver.scaling.load(saved.metadata.residual_scaling)
            self._staleness.load_state_dict(saved.arrived)
            self.driver.is_checked = False
        tell_resumed(self.driver)

    def load_checkpoint(
        self,
        checkpoint_id: Any = None,
        *,
        key: str = "oktopk",
        storage_reader: StorageReader | None = None,
    ) -> None:
        """Load a state that `torch.distributed.checkpoint` saved under `key`, on any mesh.

        Every rank must call it. The arguments are those of `dcp.load`.
        """
        reader = storage_reader or FileSystemReader(checkpoint_id)
        keys = reader.read_metadata().state_dict_metadata
        template = {key: self._template(*fsdp_state.saved_mesh(keys, key))}
        load_distributed(template, storage_reader=reader)
        self.load_state_dict(template[key])

    @property
    def by_rank(self) -> NoReturn:
        """Not for a sharded model, whose state `torch.distributed.checkpoint` saves as it is."""
        raise TypeError(f"the state of a sharded model is not saved by rank: {USE_DCP}")

    def gathered_state_dict(self) -> dict[str, Any]:
        """Not for a sharded model, whose state does not fit one rank."""
        raise TypeError(f"the state of a sharded model is not gathered on one rank: {USE_DCP}")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Not for a sharded model, whose state is of DTensors."""
        raise TypeError(f"the state of a sharded model is not saved by rank: {USE_DCP}")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Not for a sharded model: use `load_checkpoint`."""
        raise TypeError(f"the state of a sharded model is not saved by rank: {USE_DCP}")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Close the process groups. A later backward of the model raises, until `attach_fsdp` is
        called again: the replicas would drift apart."""
        for module in self.driver.parameters.modules:
            module.hook(refuse_backward)
        self._staleness.close()
        self.driver.buffers.close()
        self._finalizer()
        self._close_comm()

    def _template(self, replicas: int, shards: int) -> dict[str, Any]:
        """What this rank needs of a checkpoint of so many replicas and shards, to load into."""
        mine = self.state_dict()
        if (replicas, shards) == (self.comm.size, self.driver.shard_comm.size):
            return mine
        layout = self.driver.parameters
        # one replica at least, for the shapes
        needed = taken_over(range(replicas), self.comm.rank, self.comm.size) or [0]
        residuals = {
            str(each): fsdp_state.as_dtensors(
                {name: layout.zeros(name) for name in layout.parameters}, layout
            )
            for each in needed
        }
        return mine | {"residuals": residuals, "metadata": {fsdp_state.place(0, 0): ""}}

    def _parse(self, state: dict[str, Any] | list[dict[str, Any]]) -> Saved:
        own = fsdp_state.of_this_rank(state, self.comm, self.driver.shard_comm)
        return super()._parse(own)

    def _take(self, number: int, flat: Tensor) -> None:
        """The hook of an FSDP module, in backward."""
        with self._failing_together():
            backward = torch._C._current_graph_task_id()
            if backward != self._backward:  # the first of this backward
                if self._backward >= 0:
                    self.driver.forget()
                self._backward = backward
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self.driver.take(number, flat)

    def _end_backward(self) -> None:
        """Called by autograd after FSDP's own callback, which has reduced what was left."""
        with self._failing_together():
            self._backward = -1
            self.driver.exchange()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An error in the block ends the exchange on all ranks; a skipped step does not."""
        detector = self._connection.failure_detector
        detector.step = self.step
        try:
            if self.failure is not None:
                raise RuntimeError(f"an exchange failed before: {self.failure}") from self.failure
            if detector.diagnosis is not None:
                raise ExchangeError("another rank reported a failure")
            yield
        except NonfiniteError:
            raise
        except BaseException as error:  # Ctrl-C too: the other ranks must learn of it
            if self.failure is None:
                self.failure = error
                detector.abort(error, self._everyone)  # raises one that names the rank at fault
            raise
