# SPDX-License-Identifier: Apache-2.0
"""A run that a framework stops and resumes has the bits of one that never stopped, on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from frameworks import (
    BATCH,
    NUM_STEPS,
    SPARSE,
    STOP,
    dataset,
    net,
    no_warnings,
    result,
    torchrun_environment,
)

TIMEOUT = 100  # seconds: importing a framework takes most of them


def assert_resumed(ranks) -> None:
    """Each rank returned the straight run and the resumed one."""
    for straight, resumed in ranks:
        assert straight["step"] == resumed["step"] == NUM_STEPS
        for kind in ("weights", "residuals"):
            assert straight[kind], kind
            assert straight[kind].keys() == resumed[kind].keys()
            for name, value in straight[kind].items():
                assert torch.equal(value, resumed[kind][name]), (kind, name)
    first, second = (straight["residuals"] for straight, _ in ranks)
    assert any(not torch.equal(first[name], second[name]) for name in first)  # each has its own


# Accelerate


def accelerated(folder: str, first: int, last: int, load: bool, save: bool) -> dict:
    from accelerate import Accelerator

    from oktopk.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(dataset(), batch_size=BATCH)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = attach(accelerator, model, optimizer, **SPARSE)
    if load:
        accelerator.load_state(folder)
    for step, (x, y) in enumerate(loader):
        if first <= step < last:
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
    done = result(accelerator.unwrap_model(model), handle)
    handle.close()
    return done


def accelerate_program(group, folder: str) -> tuple[dict, dict]:
    with torchrun_environment(), no_warnings():
        straight = accelerated(folder, 0, NUM_STEPS, load=False, save=False)
        accelerated(folder, 0, STOP, load=False, save=True)
        return straight, accelerated(folder, STOP, NUM_STEPS, load=True, save=False)


def test_accelerate_saves_and_resumes_all_ranks(worlds, tmp_path):
    pytest.importorskip("accelerate", reason="pip install 'oktopk[integrations]'")
    folder = str(tmp_path / "state")
    assert_resumed(worlds.run(2, accelerate_program, folder, timeout=TIMEOUT))
    assert (tmp_path / "state" / f"oktopk-1-of-2.step-{STOP}.pt").is_file()


def registered(group, folder: str) -> tuple[dict, dict]:
    """`register_for_checkpointing(handle.gathered)` carries all ranks in a file of Accelerate's."""
    from accelerate import Accelerator

    import oktopk

    with torchrun_environment(), no_warnings():
        done = []
        for load in (False, True):
            accelerator = Accelerator(cpu=True)
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            handle = oktopk.attach(model, optimizer=optimizer, **SPARSE)
            accelerator.register_for_checkpointing(handle.gathered)
            if load:
                accelerator.load_state(folder)
            else:
                x = torch.randn(NUM_STEPS, BATCH, 48, generator=_generator())
                for step in range(NUM_STEPS):
                    accelerator.backward(model(x[step]).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
            done.append(result(accelerator.unwrap_model(model), handle))
            handle.close()
        return done[0], done[1]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7 + torch.distributed.get_rank())


def test_accelerate_checkpoints_a_registered_handle_of_all_ranks(worlds, tmp_path):
    pytest.importorskip("accelerate", reason="pip install 'oktopk[integrations]'")
    assert_resumed(worlds.run(2, registered, str(tmp_path / "state"), timeout=TIMEOUT))


# Hugging Face Trainer


def hugging_face(folder: str, resume, callback=None, adds: bool = True) -> tuple[dict, object]:
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from oktopk.integrations.huggingface import OktopkCallback

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.net = net()

        def _init_weights(self, module):
            """As `net` has made them."""

        def forward(self, x, labels):
            out = self.net(x)
            return {"loss": mse_loss(out, labels), "logits": out}

    examples = [{"x": x, "labels": y} for x, y in dataset()]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        save_steps=STOP,
        save_strategy="steps",
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=3,
    )
    trainer = Trainer(model=Model(PretrainedConfig()), args=arguments, train_dataset=examples)
    added = OktopkCallback(trainer, **SPARSE)
    if adds:
        trainer.add_callback(added)
    if callback is not None:
        trainer.add_callback(callback())
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.callback_handler.callbacks.count(added) == 1
    return result(trainer.model, added.handle), added


def hugging_face_program(group, folder: str) -> tuple[dict, dict]:
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            control.should_training_stop = state.global_step == STOP

    with torchrun_environment(), no_warnings():
        straight, added = hugging_face(f"{folder}/straight", None, adds=False)
        assert added.handle.closed and added.handle.settings.warmup_steps == 2
        hugging_face(f"{folder}/stopped", None, Stops)
        return straight, hugging_face(f"{folder}/stopped", True)[0]


def test_hugging_face_trainer_saves_and_resumes_all_ranks(worlds, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'oktopk[integrations]'")
    assert_resumed(worlds.run(2, hugging_face_program, str(tmp_path), timeout=TIMEOUT))
    saved = tmp_path / "stopped" / f"checkpoint-{STOP}"
    assert (saved / f"oktopk-1-of-2.step-{STOP}.pt").is_file()


def hugging_face_without_a_file(group, folder: str) -> list[str]:
    told = []
    with torchrun_environment() as rank:
        hugging_face(folder, None)
        for lost in (f"oktopk-{each}-of-2.step-{STOP}.pt" for each in (1, 0)):
            if rank == 1:
                (Path(folder) / f"checkpoint-{STOP}" / lost).unlink()
            torch.distributed.barrier()
            try:
                hugging_face(folder, f"{folder}/checkpoint-{STOP}")
            except ValueError as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def test_hugging_face_without_the_file_of_one_rank_is_an_error_on_all(worlds, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'oktopk[integrations]'")
    ranks = worlds.run(2, hugging_face_without_a_file, str(tmp_path), timeout=TIMEOUT)
    for told in ranks:
        assert len(told) == 1  # without any file the run begins anew, with a warning
        assert told[0].startswith("FileError: ") and f"checkpoint-{STOP}" in told[0]
        assert f"their state is of step {STOP} on rank 0 but not readable on rank 1" in told[0]
    assert "oktopk-1-of-2.step-*.pt: does not exist" in ranks[1][0]


def first_tries(group, folder: str) -> list[str]:
    """The three things that people try first, and what they are told."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerCallback

    import oktopk
    from oktopk.integrations.huggingface import OktopkCallback

    class Model(PreTrainedModel):
        def __init__(self):
            super().__init__(PretrainedConfig())
            self.net = nn.Linear(2, 2)

        def forward(self, x):
            return {"loss": self.net(x).sum()}

    told = []

    def tried(act) -> None:
        try:
            act()
        except TypeError as error:
            told.append(str(error))

    class InCallback(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **more):
            tried(lambda: oktopk.attach(model, density=0.1))
            control.should_training_stop = True

    with torchrun_environment():
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], max_steps=1)
        examples = [{"x": torch.ones(2)}] * 8
        trainer = Trainer(Model(), arguments, train_dataset=examples, callbacks=[InCallback])
        tried(lambda: oktopk.attach(trainer.model, density=0.1))
        tried(lambda: oktopk.attach(trainer.model_wrapped, optimizer=object(), density=0.1))
        trainer.callback_handler.on_train_begin(arguments, trainer.state, trainer.control)
        tried(lambda: OktopkCallback(density=0.1))
    return told


def test_what_people_try_first_with_hugging_face_names_the_line_to_write(worlds, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'oktopk[integrations]'")
    for told in worlds.run(2, first_tries, str(tmp_path), timeout=TIMEOUT):
        assert len(told) == 4
        line = "trainer.add_callback(OktopkCallback(trainer, density=0.1))"
        assert all(line in text for text in told)


# Ignite


def ignited(folder: str, last: int, load: bool) -> dict:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    from oktopk.integrations.ignite import attach

    model = idist.auto_model(net())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))
    handle = attach(model, optimizer, **SPARSE)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    engine = Engine(update)
    saved = {"model": model, "optimizer": optimizer, "oktopk": handle.gathered, "engine": engine}
    saver = DiskSaver(folder, create_dir=True, require_empty=False)
    at_stop = Events.ITERATION_COMPLETED(once=STOP)
    engine.add_event_handler(at_stop, Checkpoint(saved, saver))
    if last == STOP:
        engine.add_event_handler(at_stop, engine.terminate)
    if load:
        torch.distributed.barrier()  # rank 0 writes
        state = torch.load(f"{folder}/checkpoint_{STOP}.pt", weights_only=True)
        Checkpoint.load_objects(saved, state)
    # two batches an epoch: Ignite does not skip the batches of an epoch that was broken off
    data = list(DataLoader(dataset(), batch_size=BATCH))[idist.get_rank() :: 2][:2]
    engine.run(data, max_epochs=NUM_STEPS // 2)
    done = result(model.module, handle)
    handle.close()
    return done


def ignite_program(group, folder: str) -> tuple[dict, dict]:
    with torchrun_environment(), no_warnings():
        straight = ignited(f"{folder}/a", NUM_STEPS, load=False)
        ignited(f"{folder}/b", STOP, load=False)
        return straight, ignited(f"{folder}/b", NUM_STEPS, load=True)


def test_ignite_saves_and_resumes_all_ranks(worlds, tmp_path):
    pytest.importorskip("ignite", reason="pip install 'oktopk[integrations]'")
    assert_resumed(worlds.run(2, ignite_program, str(tmp_path), timeout=TIMEOUT))


# Lightning and Fabric


def lightning_run(folder: str, stop: int, ckpt_path: str | None) -> dict:
    from lightning import LightningModule, Trainer

    from oktopk.integrations.lightning import OktopkCallback

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            return mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    # two batches an epoch: Lightning does not skip the batches of an epoch that was broken off
    rank, some = torch.distributed.get_rank(), dataset(2 * BATCH * 2)
    mine = torch.utils.data.Subset(some, range(rank, len(some), 2))
    added = OktopkCallback(**SPARSE)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=stop // 2,
        callbacks=[added],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(mine, batch_size=BATCH), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/at-{stop}.ckpt")
    done = result(module, added.handle)
    added.handle.close()
    return done


def lightning_program(group, folder: str) -> tuple[dict, dict]:
    import warnings

    with torchrun_environment(), no_warnings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of few workers
        straight = lightning_run(f"{folder}/a", NUM_STEPS, None)
        lightning_run(f"{folder}/b", STOP, None)
        return straight, lightning_run(f"{folder}/b", NUM_STEPS, f"{folder}/b/at-{STOP}.ckpt")


def test_lightning_saves_and_resumes_all_ranks(worlds, tmp_path):
    pytest.importorskip("lightning", reason="pip install 'oktopk[integrations]'")
    assert_resumed(worlds.run(2, lightning_program, str(tmp_path), timeout=TIMEOUT))


def fabric_run(folder: str, first: int, last: int) -> dict:
    from lightning import Fabric

    from oktopk.integrations.lightning import attach_fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    inner = net()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(inner, optimizer)
    handle = attach_fabric(fabric, model, optimizer, **SPARSE)
    state = {"model": model, "optimizer": optimizer, "oktopk": handle.gathered}
    if first:
        fabric.load(f"{folder}/state.ckpt", state)
    batches = list(DataLoader(dataset(), batch_size=BATCH))[fabric.global_rank :: 2]
    for x, y in batches[first:last]:
        optimizer.zero_grad()
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
    if last == STOP:
        fabric.save(f"{folder}/state.ckpt", state)
    done = result(inner, handle)
    handle.close()
    return done


def fabric_program(group, folder: str) -> tuple[dict, dict]:
    with torchrun_environment(), no_warnings():
        straight = fabric_run(folder, 0, NUM_STEPS)
        fabric_run(folder, 0, STOP)
        return straight, fabric_run(folder, STOP, NUM_STEPS)


def test_fabric_saves_and_resumes_all_ranks(worlds, tmp_path):
    pytest.importorskip("lightning", reason="pip install 'oktopk[integrations]'")
    assert_resumed(worlds.run(2, fabric_program, str(tmp_path), timeout=TIMEOUT))


# Without a framework, and without other ranks


def plain(folder: str, first: int, last: int) -> dict:
    """A script whose own checkpoint is written by rank 0 alone."""
    from torch.nn.parallel import DistributedDataParallel

    import oktopk

    rank = torch.distributed.get_rank()
    inner = net()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    if first:
        saved = torch.load(f"{folder}/ckpt.pt", weights_only=True)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DistributedDataParallel(inner)
    handle = oktopk.attach(model, optimizer=optimizer, **SPARSE)
    handle.checkpoint_every(STOP // 2, folder, resume=first)
    batches = list(DataLoader(dataset(), batch_size=BATCH))[rank::2]
    for step in range(first, last):
        if step == STOP and rank == 0:
            states = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, f"{folder}/ckpt.pt")
        optimizer.zero_grad()
        x, y = batches[step]
        mse_loss(model(x), y).backward()
        optimizer.step()
    done = result(inner, handle)
    handle.close()
    torch.distributed.barrier()
    return done


def plain_program(group, folder: str) -> tuple[dict, dict]:
    with no_warnings():
        straight = plain(folder, 0, NUM_STEPS)
        return straight, plain(folder, STOP, NUM_STEPS)


def test_a_script_that_saves_on_rank_0_alone_resumes_all_ranks(worlds, tmp_path):
    assert_resumed(worlds.run(2, plain_program, str(tmp_path)))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-6", "step-9"]


def lost_state(group, folder: str) -> str:
    from torch.nn.parallel import DistributedDataParallel

    import oktopk

    handle = oktopk.attach(DistributedDataParallel(net()), **SPARSE)
    try:
        handle.checkpoint_every(3, folder, resume=4)
    except ValueError as error:
        return str(error)
    finally:
        handle.close()
    return "no error"


def test_a_state_that_was_not_saved_is_named(worlds, tmp_path):
    worlds.run(2, plain_program, str(tmp_path))
    for told in worlds.run(2, lost_state, str(tmp_path)):
        assert "step-4: no rank has saved its state after step 4" in told
        assert "states were saved after steps: 6, 9" in told


def test_one_process_alone_trains_as_without(tmp_path, capsys):
    from oktopk.integrations import attach_wrapped, load_if_saved

    model = net()
    handle = attach_wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "one process: there is nothing to exchange" in capsys.readouterr().err
    handle.save(tmp_path)
    load_if_saved(handle, tmp_path)
    handle.gathered.load_state_dict(handle.gathered.state_dict())
    assert not list(tmp_path.iterdir())


def test_integrations_pass_on_every_option_of_attach():
    from inspect import signature

    import oktopk
    from oktopk.adapters.ddp import AttachOptions

    options = set(signature(oktopk.attach).parameters) - {"model", "optimizer", "scaler"}
    assert set(AttachOptions.__annotations__) == options
