# SPDX-License-Identifier: Apache-2.0
"""Ray Train on a real local cluster of two workers: save, resume, the same bits."""

from __future__ import annotations

import tempfile

import pytest
import torch

from frameworks import NUM_STEPS, STOP


def train_loop(config: dict) -> None:
    """One worker, from the checkpoint that Ray has, if it has one, to the step `last`."""
    from pathlib import Path

    import ray.train
    import ray.train.torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader

    from frameworks import BATCH, SPARSE, dataset, net, result
    from oktopk.integrations.ray import attach

    inner = net()
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/model.pt", weights_only=True)
        inner.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model = ray.train.torch.prepare_model(inner)
    handle = attach(model, optimizer, **SPARSE)
    rank = ray.train.get_context().get_world_rank()
    batches = list(DataLoader(dataset(), batch_size=BATCH))[rank::2]
    for step in range(handle.step, config["last"]):
        optimizer.zero_grad()
        x, y = batches[step]
        mse_loss(model(x), y).backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        handle.save(folder)
        if rank == 0:
            states = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, f"{folder}/model.pt")
        torch.save(result(inner, handle), Path(config["folder"]) / f"{config['name']}-{rank}.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))
    handle.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_train_saves_and_resumes_all_ranks(tmp_path):
    ray = pytest.importorskip("ray", reason="pip install 'oktopk[integrations]'")
    pytest.importorskip("ray.train.torch", reason="pip install 'oktopk[integrations]'")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def run(name: str, last: int) -> None:
        """A run of the same name continues from the last checkpoint of that name."""
        TorchTrainer(
            train_loop,
            train_loop_config={"name": name, "last": last, "folder": str(tmp_path)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(name=name, storage_path=str(tmp_path / "ray")),
        ).fit()

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        configure_logging=False,
    )
    try:
        run("straight", NUM_STEPS)
        run("resumed", STOP)
        run("resumed", NUM_STEPS)
    finally:
        ray.shutdown()
    for rank in range(2):
        straight, resumed = (
            torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("straight", "resumed")
        )
        assert straight["step"] == resumed["step"] == NUM_STEPS
        for kind in ("weights", "residuals"):
            assert straight[kind]
            for name, value in straight[kind].items():
                assert torch.equal(value, resumed[kind][name]), (kind, name)
