"""The language model of several examples, in plain PyTorch for one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

__all__ = ["HEADS", "Block", "Transformer"]

HEADS = 4
LAYERS = 2


class Attention(nn.Module):
    """Causal attention with rotary positions, of as many heads as ``wq`` gives features for."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._head_size = size // HEADS
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, length, size), as ``x``."""
        q, k, v = (self._heads(layer(x)) for layer in (self.wq, self.wk, self.wv))
        attended = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        result: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._head_size).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    """Queries or keys of shape (..., length, head size), turned by their positions (Su et al., 2021)."""
    length, size = x.shape[-2:]
    steps = torch.linspace(0, 1, size // 2, device=x.device)
    angles = torch.outer(torch.arange(length, device=x.device), 1000.0**-steps)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size, 3 * size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, length, size), as ``x``."""
        result: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(size), Attention(size)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(size), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, length, size), as ``x``."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class Transformer(nn.Module):
    """Scores every character as the next one, at each place. The head's weight is the embedding's."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.Sequential(*(Block(size) for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=size**-0.5)

    def forward(self, characters: Tensor) -> Tensor:
        """Scores of shape (batch, length, vocabulary) for characters of shape (batch, length)."""
        scores: Tensor = self.head(self.norm(self.layers(self.embedding(characters))))
        return scores
