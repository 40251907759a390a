# SPDX-License-Identifier: Apache-2.0
"""Ray Train on a real local cluster of two workers: save, resume, the same bits."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from frameworks import NUM_STEPS, STOP, ray_worker


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
            ray_worker,
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
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
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
