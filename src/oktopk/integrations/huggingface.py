# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Trainer: one line between `Trainer(...)` and `trainer.train()`."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any, Unpack

from oktopk.adapters.ddp import AttachOptions
from oktopk.adapters.ddp_handle import Handle
from oktopk.integrations import Unattached, attach_wrapped, load_if_saved
from oktopk.utils.arguments import written
from oktopk.utils.extras import require

require("oktopk.integrations.huggingface", "transformers", "accelerate")

from transformers import (  # noqa: E402 - only when it is there
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402


class OktopkCallback(TrainerCallback):
    """Compress the gradient exchange of a `Trainer`.

    `trainer.add_callback(OktopkCallback(trainer))`

    The model is attached when `train` has wrapped it, with the trainer's optimizer, its scaler and
    its number of steps. Every rank saves its state into `checkpoint-N`, beside the weights, and
    loads it when `train(resume_from_checkpoint=...)` resumes from there.

    Args:
        trainer: the trainer that the callback is added to. Callbacks do not get the wrapped model.
            If `add_callback` is forgotten, `trainer.train` adds it.
        options: those of `oktopk.attach`; `total_steps` is the trainer's.
    """

    def __init__(self, trainer: Trainer | None = None, **options: Unpack[AttachOptions]) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                "OktopkCallback needs the trainer, whose model it attaches: after Trainer(...), "
                f"write trainer.add_callback(OktopkCallback(trainer{written(options)}))"
            )
        self.handle: Handle | Unattached | None = None
        """Of the last or present `train`; None before the first."""

        self._trainer = trainer
        self._options: AttachOptions = options
        self._resumed_from: str | None = None
        trainer.train = self._remembering(trainer.train)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Attach the wrapped model; load the state of the checkpoint that is resumed from."""
        if self.handle is not None:
            self.handle.close()  # of a `train` that raised
        trainer: Any = self._trainer  # its own types leave open what `train` has set by now
        options: AttachOptions = {"total_steps": state.max_steps, **self._options}
        scaler = trainer.accelerator.scaler
        self.handle = attach_wrapped(trainer.model_wrapped, trainer.optimizer, scaler, **options)
        if self._resumed_from is not None:
            load_if_saved(self.handle, self._resumed_from)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Save this rank's state into the checkpoint that was just written."""
        # the trials of a hyperparameter search have other folders, and are never resumed
        is_resumable = not args.save_only_model and not state.is_hyper_param_search
        if self.handle is not None and is_resumable:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self.handle.save(Path(args.output_dir or ".") / folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """End the exchange; its statistics can still be read."""
        if self.handle is not None:
            self.handle.close()

    def _remembering(self, train: Any) -> Any:
        """`train`, with a note of the checkpoint: the trainer does not tell its callbacks. It adds
        this callback if nobody has, since the run would be dense without a word."""

        @wraps(train)
        def noted(resume_from_checkpoint: str | bool | None = None, *args: Any, **more: Any) -> Any:
            folder = resume_from_checkpoint or None
            if folder is True:
                folder = get_last_checkpoint(self._trainer.args.output_dir or ".")
            self._resumed_from = folder
            if self not in self._trainer.callback_handler.callbacks:
                self._trainer.add_callback(self)
            return train(resume_from_checkpoint, *args, **more)

        return noted
