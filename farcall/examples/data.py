"""The data of several examples: images of handwritten digits, which come with scikit-learn, and a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Images", "Text", "load_images", "load_text"]


@dataclass(frozen=True)
class Images:
    """Images of handwritten digits: pixels of shape (N, 64), values 0 to 1, and labels of shape (N,)."""

    pixels: Tensor
    labels: Tensor

    def __getitem__(self, which: slice | Tensor) -> Images:
        return Images(self.pixels[which], self.labels[which])

    def __len__(self) -> int:
        return len(self.labels)


def load_images() -> tuple[Images, Images]:
    """The 1,797 images that come with scikit-learn: three quarters to train on, one quarter held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = Images(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    shuffled = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    held_out = len(images) // 4
    return shuffled[held_out:], shuffled[:held_out]


class Text(NamedTuple):
    """A text as numbers of characters, of shape (characters,), and the different ones, by number."""

    characters: Tensor
    alphabet: list[str]

    @property
    def vocabulary(self) -> int:
        """How many different characters there are."""
        return len(self.alphabet)

    def spelled(self, characters: Tensor) -> str:
        """Return the text for numbers of shape (characters,)."""
        return "".join(self.alphabet[number] for number in characters.tolist())

    def batch(self, step: int, size: int, length: int) -> Tensor:
        """Pieces of the text, of shape (size, length + 1): the same on all ranks."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.characters) - length, (size,), generator=generator)
        return self.characters[starts.unsqueeze(1) + torch.arange(length + 1)]


def load_text() -> Text:
    """Seven of Shakespeare's sonnets; lines that begin with # tell their source."""
    lines = (Path(__file__).parent / "sonnets.txt").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).strip()
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return Text(torch.tensor([numbers[character] for character in text]), alphabet)
