"""A worker that computes on an accelerator: its device, and its source of random numbers there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from spmd.engine.errors import SpmdError

__all__ = ["CommonGenerator", "device_of_worker"]

_MARK: Final = b"farcall\0"
_SEED_BYTES: Final = 8


def device_of_worker(asked: str, hosts: Sequence[str], rank: int, worker: str) -> torch.device:
    """Return the device on which a worker computes.

    Args:
        asked: its name; without an index, the workers of a host use its devices in turn.
        hosts: host of each worker, by rank.
        rank: rank of the worker.
        worker: name of the worker, for errors.

    Raises:
        SpmdError: this process has no such device.
    """
    mine = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = 0 if mine is None else torch.accelerator.device_count()
    kind, colon, index = asked.partition(":")
    number = count
    if index.isdecimal():
        number = int(index)
    elif count and not colon:
        number = hosts[:rank].count(hosts[rank]) % count
    if mine is None or mine.type != kind or number >= count:
        has = "has no accelerator" if mine is None else f"has {count} devices of type '{mine.type}'"
        raise SpmdError(f"worker '{worker}' was asked to compute on '{asked}', and its process {has}")
    return torch.device(kind, number)


class CommonGenerator:
    """The generator that is the same on all workers, on an accelerator. Its states have the size of those of
    the CPU's generator, as programs expect. The state of a CPU generator stands for its seed.

    Args:
        device: device of this worker.

    Attributes:
        source: the generator.
    """

    def __init__(self, device: torch.device) -> None:
        self.source = torch.Generator(device)
        self._device = device
        self._bytes = self.source.get_state().numel()
        self._all_bytes = torch.get_rng_state().numel()

    def manual_seed(self, seed: int) -> None:
        """Seed it."""
        self.source.manual_seed(seed)

    def get_state(self) -> Tensor:
        """Its state, on the device."""
        state = self.source.get_state()
        if self._bytes != self._all_bytes:
            packed = torch.zeros(self._all_bytes, dtype=torch.uint8, device="cpu")
            begin = _SEED_BYTES + len(_MARK)
            packed[_SEED_BYTES:begin] = torch.frombuffer(bytearray(_MARK), dtype=torch.uint8)
            packed[begin : begin + self._bytes] = state
            state = packed
        return state.to(self._device)

    def set_state(self, state: Tensor) -> None:
        """Set its state, to one of its own or of a CPU generator."""
        host = state.cpu()
        content = host.numpy().tobytes()
        begin = _SEED_BYTES + len(_MARK)
        if content[_SEED_BYTES:begin] == _MARK:
            self.source.set_state(host[begin : begin + self._bytes].clone())
        elif self._bytes == self._all_bytes:  # a CPU generator in all but its device
            self.source.set_state(host)
        else:
            self.source.manual_seed(int.from_bytes(content[:_SEED_BYTES], "little"))
