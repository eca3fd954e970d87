"""The data of several examples: images of handwritten digits, which come with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Images", "load_images"]


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
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise RuntimeError("this example needs scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    images = Images(torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target))
    shuffled = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    held_out = len(images) // 4
    return shuffled[held_out:], shuffled[:held_out]
