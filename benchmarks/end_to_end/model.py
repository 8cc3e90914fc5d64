"""A pre-norm transformer whose attention is handed to it: GPT-2's decoder, BERT's encoder and a Long Range Arena encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v `(B, H, T, D)` to o."""


@dataclass(frozen=True)
class Size:
    """Of a model: layers, width, heads, vocabulary, longest sequence; causal or not."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    longest: int
    causal: bool


GPT2_MEDIUM = Size(layers=24, width=1024, heads=16, vocabulary=50257, longest=4096, causal=True)
BERT_LARGE = Size(layers=24, width=1024, heads=16, vocabulary=30522, longest=512, causal=False)
LRA = Size(layers=4, width=256, heads=4, vocabulary=256, longest=65536, causal=False)
"""The paper's Long Range Arena models have 2 to 6 layers and widths of 64 to 1024; head dim 64 as the other two."""


class Block(nn.Module):
    """Attention, then the feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.width
        self.heads, self.attention = size.heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Token ids `(B, T)` to logits `(B, T, vocabulary)`."""

    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.longest, size.width)
        self.blocks = nn.Sequential(*[Block(size, attention) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in (self.tokens.weight, self.places.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))
