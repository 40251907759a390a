# SPDX-License-Identifier: Apache-2.0
"""lstman4: two convolutions over the spectrogram, LSTM layers, and a character for every frame.

At its full size (hidden 800, 5 layers, 32 channels) it has 27,569,568 parameters in 40 tensors. Two
things are done otherwise than in the reference, with the same result: masks are made on the
device, and the lookahead is one depthwise convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BINS = 161
LETTERS = 29


def beyond(lengths: Tensor, frames: int) -> Tensor:
    """True for the frames after the end of each sequence: (N, frames)."""
    return torch.arange(frames, device=lengths.device) >= lengths.unsqueeze(1)


class Conv2d(nn.Conv2d):
    """A convolution whose weight gradient has the strides of the weight, for any input strides.

    DDP warns about other strides. The gradient goes through a flat view, which restores them.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.flatten().view_as(self.weight)
        return self._conv_forward(input, weight, self.bias)


class Conv(nn.ModuleList):
    """Convolutions on (N, 1, bins, frames); every stage is zero beyond the sequence's end."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            [
                Conv2d(1, channels, (41, 11), (2, 2), (20, 5)),
                nn.BatchNorm2d(channels),
                nn.Hardtanh(0, 20, inplace=True),
                Conv2d(channels, channels, (21, 11), (2, 1), (10, 5)),
                nn.BatchNorm2d(channels),
                nn.Hardtanh(0, 20, inplace=True),
            ]
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        within = None
        # channels last, twice as fast on a CPU; of one channel only the strides can tell
        x = x.squeeze(1).unsqueeze(3).permute(0, 3, 1, 2)
        for stage in self:
            x = stage(x)
            if within is None:
                within = ~beyond(lengths, x.shape[-1])[:, None, None]
            x = x * within  # masked_fill would lose the order in memory
        return x


class Recurrent(nn.Module):
    """Batch norm over all frames (not before the first layer), then an LSTM on (T, N, features).

    A second direction is an LSTM of its own on the reversed frames; the two are summed, so the
    width is `hidden` either way. Sequences are not packed: padding comes after a sequence's end, so
    it cannot reach the frames that count, and packing takes 2 to 3 times as long on a CPU.
    """

    def __init__(self, inputs: int, hidden: int, both_ways: bool, normed: bool) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(inputs) if normed else None
        self.rnn = nn.LSTM(inputs, hidden)
        self.rnn_reverse = nn.LSTM(inputs, hidden) if both_ways else None

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.batch_norm is not None:
            x = over_frames(self.batch_norm, x)
        y = self.rnn(x)[0]
        if self.rnn_reverse is not None:
            order = reversed_frames(lengths, x.shape[0]).unsqueeze(2)
            back = self.rnn_reverse(x.gather(0, order.expand_as(x)))[0]
            y = y + back.gather(0, order.expand_as(back))
        return y.masked_fill(beyond(lengths, y.shape[0]).T.unsqueeze(2), 0)


def reversed_frames(lengths: Tensor, frames: int) -> Tensor:
    """Indices (frames, N) that reverse each sequence and leave the padding in place.

    Applying them twice restores the order.
    """
    at = torch.arange(frames, device=lengths.device).unsqueeze(1)
    return torch.where(at < lengths, lengths - 1 - at, at)


class Lookahead(nn.Module):
    """Each frame becomes a weighted sum of itself and the next `context` frames, by feature."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, context + 1))
        bound = (context + 1) ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        features, taps = self.weight.shape
        future = functional.pad(x.permute(1, 2, 0), (0, taps - 1))
        return functional.conv1d(future, self.weight.unsqueeze(1), groups=features).permute(2, 0, 1)


def over_frames(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a module to all frames of (T, N, features) as one batch."""
    return module(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Lstman4(nn.Module):
    """Spectrograms (N, 1, 161, T) with lengths, longest first, to log probabilities (T', N, 29)."""

    def __init__(
        self,
        *,
        hidden: int = 800,
        layers: int = 5,
        bidirectional: bool = False,
        channels: int = 32,
        context: int = 20,
    ) -> None:
        super().__init__()
        self.conv = Conv(channels)
        bins = ((BINS + 1) // 2 + 1) // 2  # each convolution halves the frequencies: 81, 41
        widths = [bins * channels] + [hidden] * (layers - 1)
        self.rnns = nn.ModuleList(
            Recurrent(width, hidden, bidirectional, normed=layer > 0)
            for layer, width in enumerate(widths)
        )
        # the second direction sees future frames already
        self.lookahead = (
            None
            if bidirectional
            else nn.Sequential(Lookahead(hidden, context), nn.Hardtanh(0, 20, inplace=True))
        )
        self.fc = nn.Sequential(nn.BatchNorm1d(hidden), nn.Linear(hidden, LETTERS, bias=False))

    @staticmethod
    def frames(lengths: Tensor) -> Tensor:
        """Output frames for a number of input frames: the first convolution has a stride of 2."""
        return (lengths - 1) // 2 + 1

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        lengths = self.frames(lengths)
        x = self.conv(x, lengths)
        x = x.flatten(1, 2).permute(2, 0, 1).contiguous()
        for layer in self.rnns:
            x = layer(x, lengths)
        if self.lookahead is not None:
            x = self.lookahead(x)
        return over_frames(self.fc, x).log_softmax(-1), lengths


def ctc_loss(log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """CTC of each utterance, summed over time: (N,). Blank is 0. Its mean is the training loss.

    Infinite for an utterance with more characters than frames, which `manifest.check` refuses.
    """
    return functional.ctc_loss(log_probs, targets, lengths, target_lengths, reduction="none")
