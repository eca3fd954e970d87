"""A small model of Llama's kind: grouped-query attention, RMSNorm, SwiGLU, tied embeddings, a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Cache", "Llama", "Shape"]


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    vocabulary: int = 32
    dim: int = 16
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 24
    dropout: float = 0.0


Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, ``[batch, heads, positions, head_dim]``."""


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(
        self, x: Tensor, cached: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        start = 0 if cached is None else cached[0].shape[2]
        q, k, v = (self._heads(layer(x)) for layer in (self.wq, self.wk, self.wv))
        q, k = rotated(q, start), rotated(k, start)
        if cached is not None:
            k, v = torch.cat([cached[0], k], 2), torch.cat([cached[1], v], 2)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=cached is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(attended.transpose(1, 2).flatten(2)), (k, v)

    def _heads(self, x: Tensor) -> Tensor:
        """As many as there are: this rank's."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


def rotated(x: Tensor, start: int) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = 10.0 ** -torch.arange(half)
    angles = torch.outer(torch.arange(start, start + x.shape[2]), frequencies).to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.dropout(functional.silu(self.w1(x)) * self.w3(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.dropout = nn.Dropout(shape.dropout)
        self.ffn_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(
        self, x: Tensor, cached: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        attended, cached = self.attention(self.attention_norm(x), cached)
        x = x + self.dropout(attended)
        return x + self.feed_forward(self.ffn_norm(x)), cached


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.layers = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def init_weights(self) -> None:
        """As one does after ``to_empty``."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.5)
            else:
                nn.init.ones_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.step(tokens, None)[0]

    def step(self, tokens: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        x, after = self.embedding(tokens), []
        for index, layer in enumerate(self.layers):
            x, cached = layer(x, None if cache is None else cache[index])
            after.append(cached)
        return self.head(self.norm(x)), after

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Greedy, with a cache."""
        logits, cache = self.step(tokens, None)
        for _ in range(count):
            following = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, following], 1)
            logits, cache = self.step(following, cache)
        return tokens
