# SPDX-License-Identifier: Apache-2.0
"""By default the ranks of `local_steps` share the density, and all that they select arrives."""

from __future__ import annotations

import pytest
import torch

import oktopk
from oktopk import simulate

ROWS, COLUMNS = 60, 100
SPARSE_ONLY = oktopk.Policy(vectors=False, below=0)


def one_round(comm, **more) -> tuple:
    """The weight change of a rank, the weights after an exchange, the residual and the handle."""
    weights = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    model = torch.nn.ParameterList([weights])
    how = {"every": 1, "policy": SPARSE_ONLY, "wire": "fp32", **more}
    handle = oktopk.local_steps(model, optimizer, comm=comm, **how)
    generator = torch.Generator().manual_seed(comm.rank)
    weights.grad = torch.randn(ROWS, COLUMNS, generator=generator)
    change = weights.grad.clone()
    optimizer.step()
    (residual,) = handle.residuals.values()
    return change.view(-1), weights.detach().clone().view(-1), residual.view(-1), handle


def expected(changes: list[torch.Tensor], density: float) -> torch.Tensor:
    """Each rank's largest 1/P of the density, averaged over the ranks that selected the entry."""
    total, senders = torch.zeros(ROWS * COLUMNS), torch.zeros(ROWS * COLUMNS)
    for change in changes:
        places = change.abs().topk(round(density * change.numel() / len(changes))).indices
        total[places] += change[places]
        senders[places] += 1
    return -total / senders.clamp(min=1)


@pytest.mark.parametrize("P", [1, 2, 4])
def test_every_rank_selects_its_share_and_all_of_it_arrives(P):
    ranks = simulate(P, lambda comm: one_round(comm, density=0.1))
    reference = expected([change for change, *_ in ranks], 0.1)
    for change, weights, residual, handle in ranks:
        assert torch.allclose(weights, reference, atol=1e-6)
        assert (handle.settings.density, handle.settings.shared_by) == (0.1, P)
        assert handle.stats.k == round(0.1 * change.numel() / P)
        assert handle.stats.result == reference.count_nonzero()
        sent = round(0.1 * change.numel() / P)
        assert residual.count_nonzero() == change.numel() - sent  # nothing comes back


def test_a_method_by_name_selects_the_whole_density_on_every_rank():
    ranks = simulate(4, lambda comm: one_round(comm, density=0.1, method="oktopk"))
    assert all(handle.stats.local == ROWS * COLUMNS // 10 for *_, handle in ranks)
    assert all(handle.stats.result == ROWS * COLUMNS // 10 for *_, handle in ranks)


def test_density_one_is_not_shared():
    ranks = simulate(4, lambda comm: one_round(comm, density=1.0))
    mean = torch.stack([change for change, *_ in ranks]).mean(0)
    for _, weights, residual, handle in ranks:
        assert torch.allclose(weights, -mean, atol=1e-6) and not residual.any()
        assert handle.settings.density == 1


def test_payload_hardly_grows_with_the_ranks():
    def sent(comm) -> int:
        stats = one_round(comm, density=0.1)[3].stats
        return stats.bytes_sent - stats.bytes_header

    few, many = (max(simulate(P, sent)) for P in (4, 16))
    assert many < 1.3 * few


@pytest.mark.parametrize("density", [0.0, 2.0, "most"])
def test_a_wrong_density_is_named_before_it_is_shared(density):
    with pytest.raises(ValueError, match=str(density)):
        simulate(2, lambda comm: one_round(comm, density=density))


def test_rank_0_says_what_will_be_exchanged(capfd):
    simulate(2, lambda comm: one_round(comm, density=0.1))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "oktopk: local steps, world size 2, 6,000 parameters: density 10 % after"
    )
    assert "5 % from each rank by topkdsa as fp32; about " in line
    simulate(2, lambda comm: one_round(comm, density=0.1, verbose=False))
    assert not capfd.readouterr().err
