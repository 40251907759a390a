# SPDX-License-Identifier: Apache-2.0
"""A GPT: a decoder-only transformer with pre-norm blocks, learned positions and no biases.

Structure and initialisation are those of GPT-2 (Radford et al. 2019) without its biases, as in
nanoGPT. The embedding of the tokens is also the last layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights, as in GPT-2."""


class CausalSelfAttention(nn.Module):
    """Every position attends to itself and to those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (3, batch, heads, length, width of a head)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two layers with GELU, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expansion = nn.Linear(width, 4 * width, bias=False)
        self.projection = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(functional.gelu(self.expansion(x)))


class Block(nn.Module):
    """Attention, then the MLP. Both read a normalised x and add to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalSelfAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Logits of the next token at every position."""

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        context: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # a norm, whose weights are 1
            # 2 * layers projections add to x, and its variance should not grow with their number
            depth = 2 * layers if "projection" in name else 1
            nn.init.normal_(parameter, std=INITIAL_DEVIATION / depth**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, length, vocabulary) logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def generate(model: nn.Module, tokens: Tensor, number: int, context: int, known: int) -> Tensor:
    """Continue each row of tokens by `number` sampled tokens below `known`. The seed is fixed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        logits = model(tokens[:, -context:])[:, -1, :known]
        chances = logits.float().softmax(-1).cpu()
        chosen = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat([tokens, chosen.to(tokens.device)], 1)
    return tokens
