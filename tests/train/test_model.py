# SPDX-License-Identifier: Apache-2.0
"""lstman4: the reference's tensors, and the same numbers by simpler means."""

from __future__ import annotations

import torch
from torch import nn

from oktopk.lab.tasks.speech.lstman4 import Lookahead, Lstman4, ctc_loss, reversed_frames

FULL = {
    "conv.0.weight": (32, 1, 41, 11),
    "conv.0.bias": (32,),
    "conv.1.weight": (32,),
    "conv.1.bias": (32,),
    "conv.3.weight": (32, 32, 21, 11),
    "conv.3.bias": (32,),
    "conv.4.weight": (32,),
    "conv.4.bias": (32,),
    **{
        f"rnns.{layer}.rnn.{name}": shape
        for layer in range(5)
        for name, shape in {
            "weight_ih_l0": (3200, 800 if layer else 1312),
            "weight_hh_l0": (3200, 800),
            "bias_ih_l0": (3200,),
            "bias_hh_l0": (3200,),
        }.items()
    },
    **{f"rnns.{i}.batch_norm.{name}": (800,) for i in range(1, 5) for name in ("weight", "bias")},
    "lookahead.0.weight": (800, 21),
    "fc.0.weight": (800,),
    "fc.0.bias": (800,),
    "fc.1.weight": (29, 800),
}


def small(**more) -> Lstman4:
    torch.manual_seed(0)
    return Lstman4(**({"hidden": 16, "layers": 2, "channels": 4} | more))


def test_the_full_size_has_the_references_tensors():
    with torch.device("meta"):
        model = Lstman4()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == FULL
    assert len(FULL) == 40
    assert sum(p.numel() for p in model.parameters()) == 27_569_568


def test_a_sequence_does_not_depend_on_its_neighbours_or_padding():
    for both_ways in (False, True):
        model = small(bidirectional=both_ways).eval()
        x, lengths = torch.randn(3, 1, 161, 60), torch.tensor([60, 41, 30])
        for row, length in zip(x, lengths, strict=True):
            row[..., length:] = 0
        together, frames = model(x, lengths)
        for i, length in enumerate(lengths.tolist()):
            alone, [own] = model(x[i : i + 1, ..., :length], lengths[i : i + 1])
            assert own == frames[i] == (length - 1) // 2 + 1
            torch.testing.assert_close(together[:own, i], alone[:own, 0], rtol=1e-4, atol=1e-5)


def test_both_directions_are_a_bidirectional_lstm():
    layer = small(bidirectional=True).rnns[0]
    width = layer.rnn.input_size
    both = nn.LSTM(width, 16, bidirectional=True)
    state = dict(layer.rnn.state_dict())
    state |= {f"{name}_reverse": value for name, value in layer.rnn_reverse.state_dict().items()}
    both.load_state_dict(state)
    x, lengths = torch.randn(9, 3, width), torch.tensor([9, 7, 2])
    packed, _ = both(nn.utils.rnn.pack_padded_sequence(x, lengths))
    expected, _ = nn.utils.rnn.pad_packed_sequence(packed)
    torch.testing.assert_close(layer(x, lengths), expected.unflatten(2, (2, 16)).sum(2))


def test_reversing_twice_is_nothing_and_padding_stays():
    order = reversed_frames(torch.tensor([4, 2]), 5)
    assert order.T.tolist() == [[3, 2, 1, 0, 4], [1, 0, 2, 3, 4]]
    assert order.gather(0, order).T.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_lookahead_sums_the_next_frames():
    look, x = Lookahead(6, 3), torch.randn(8, 2, 6)
    expected = torch.zeros_like(x)
    for t in range(8):
        for ahead in range(min(4, 8 - t)):
            expected[t] += look.weight[:, ahead] * x[t + ahead]
    torch.testing.assert_close(look(x), expected)


def test_the_loss_is_minus_the_log_of_all_alignments():
    """Two frames, one letter: it may stand first, second or in both."""
    log_probs = torch.randn(2, 1, 29).log_softmax(-1)
    p = log_probs.exp()[:, 0]
    expected = -torch.log(p[0, 5] * p[1, 0] + p[0, 0] * p[1, 5] + p[0, 5] * p[1, 5])
    loss = ctc_loss(log_probs, torch.tensor([2]), torch.tensor([5]), torch.tensor([1]))
    torch.testing.assert_close(loss, expected.view(1))


def test_the_output_is_log_probabilities():
    """The notes fed raw scores to a CTC that wants logarithms of probabilities."""
    out, _ = small()(torch.randn(2, 1, 161, 20), torch.tensor([20, 15]))
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(10, 2))


def test_weights_get_gradients_in_their_own_strides():
    model = small()
    model(torch.randn(2, 1, 161, 20), torch.tensor([20, 15]))[0].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name
