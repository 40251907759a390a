# SPDX-License-Identifier: Apache-2.0
"""Lightning: one callback attaches the model that the strategy has wrapped.

    pip install "oktopk[examples]"
    OMP_NUM_THREADS=1 python examples/lightning_digits.py

A small CNN learns to read digits, and each step keeps 2 % of its gradient.
"""

import torch
from lightning import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from oktopk.integrations.lightning import OktopkCallback

EPOCHS, WARMUP_STEPS, NUM_TEST = 10, 25, 360
QUIET = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
SETUP = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", **dict.fromkeys(QUIET, False)}


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64)
        self.net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    seed_everything(0)  # every rank splits the data alike
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    order, labels = torch.randperm(len(images)), torch.tensor(digits.target)
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True)
    model, steps = Digits(), []
    how = {"density": 0.02, "warmup_steps": WARMUP_STEPS, "on_step": steps.append}
    trainer = Trainer(max_epochs=EPOCHS, callbacks=[OktopkCallback(**how)], **SETUP)
    trainer.fit(model, loader)

    if trainer.is_global_zero:
        with torch.no_grad():
            right = model.net(images[test]).argmax(1) == labels[test]
        sent, dense = sum(s.bytes_sent for s in steps), sum(s.bytes_dense for s in steps)
        began = next(s.step for s in steps if s.phase == "sparse")
        print(f"accuracy {right.float().mean():.3f} after {len(steps)} steps")
        print(f"bytes sent {sent:,} of {dense:,} dense; sparse from step {began}")


if __name__ == "__main__":
    main()
