"""Which samples belong to a step: a pure function of the step's number."""

from __future__ import annotations

import torch

from rpc.errors import InvalidOptionError

__all__ = ["Sampler", "part_of"]


class Sampler:
    """Draws the batch of each step: each epoch is a permutation of all samples, cut into batches.

    The batch of a step depends on the arguments and the step alone, not on who trains. The last samples of an
    epoch that do not fill a batch are left out; the next epoch has another order.

    Args:
        length: number of samples.
        batch_size: number of samples of a step, over all members together.
        seed: seed of the order.

    Raises:
        InvalidOptionError: a number is not positive, or ``batch_size`` is larger than ``length``.

    Example::

        sampler = elastic.Sampler(len(data), batch_size=48, seed=0)
        sampler.batch(7)  # indices of the samples of step 7
    """

    def __init__(self, length: int, batch_size: int, seed: int = 0) -> None:
        numbers: dict[str, object] = {"length": length, "batch_size": batch_size}
        for name, value in numbers.items():
            if not isinstance(value, int) or value < 1:
                raise InvalidOptionError(f"Sampler: {name} is {value!r}; it must be a positive integer")
        if batch_size > length:
            raise InvalidOptionError(f"Sampler: a batch of {batch_size} needs more than {length} samples")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def __repr__(self) -> str:
        return f"Sampler({self.length}, batch_size={self.batch_size}, seed={self.seed})"

    def batch(self, step: int) -> torch.Tensor:
        """Return the indices of the samples of a step, as an int64 tensor of ``batch_size`` elements."""
        epoch, place = divmod(step, self.length // self.batch_size)
        if epoch != self._epoch:
            generator = torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self.length, generator=generator, device="cpu")
            self._epoch = epoch
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]


def part_of(size: int, place: int, parts: int) -> slice:
    """Return part ``place`` of ``parts`` parts of a batch: they are disjoint, and together the batch."""
    return slice(size * place // parts, size * (place + 1) // parts)
