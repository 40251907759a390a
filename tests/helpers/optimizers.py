# SPDX-License-Identifier: Apache-2.0
"""Look-alikes of optimizers that are not installed here: the same groups and the same state."""

from __future__ import annotations

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


class Groups(Optimizer):
    """An optimizer with these settings in its groups; `step` is plain descent."""

    def __init__(self, params, lr: float = 0.1, **more) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class Lion(Groups):
    """lion-pytorch: two betas, one moment, the sign of it. bitsandbytes' has an eps of 0 too."""

    def update(self, p, group) -> None:
        moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
        p.sub_(moment.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
        moment.lerp_(p.grad, 1 - group["betas"][1])


class AdamWScheduleFree(Groups):
    """schedulefree: no first moment; its beta1 is for something else."""

    def update(self, p, group) -> None:
        state, beta = self.state[p], group["betas"][1]
        square = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        state.setdefault("z", p.clone())
        square.mul_(beta).addcmul_(p.grad, p.grad, value=1 - beta)
        way = p.grad / (square.sqrt() + group["eps"])
        p.sub_(way * group["betas"][0], alpha=group["lr"])


class Prodigy(Groups):
    """prodigyopt: its second moment is scaled by the square of a distance d."""

    def update(self, p, group) -> None:
        beta = group["betas"][1]
        square = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
        square.mul_(beta).addcmul_(p.grad, p.grad, value=1e-12 * (1 - beta))
        p.sub_(p.grad, alpha=group["lr"])


class Adam8bit(Groups):
    """bitsandbytes: both moments quantised."""

    def update(self, p, group) -> None:
        for name in ("state1", "state2"):
            moment = self.state[p].setdefault(name, torch.zeros_like(p, dtype=torch.uint8))
            moment.add_(1)
        p.sub_(p.grad, alpha=group["lr"])


class PagedAdam(Adam8bit):
    """The same without a name that tells."""


class FusedAdam(AdamW):
    """Another class with AdamW's groups and state; counts steps in the groups, as apex' does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


class AdamL2(Adam):
    """A user's own."""


class SAM(Optimizer):
    """Foret et al. 2020, as it is usually written: the base optimizer is the one that steps."""

    def __init__(self, params, base=SGD, rho=0.05, **more):
        super().__init__(params, {"rho": rho, **more})
        self.base_optimizer = base(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups

    def trained(self) -> list[torch.Tensor]:
        every = (p for group in self.param_groups for p in group["params"])
        return [p for p in every if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        for p in self.trained():
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad * (0.05 / (p.grad.norm() + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.trained():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()
