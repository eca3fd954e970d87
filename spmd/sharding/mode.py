"""``use_spmd``, with what tensors can tell of their shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.engine.driver import start
from spmd.engine.driver.logical_tensor import LogicalTensor
from spmd.engine.driver.session import PROGRAMS
from spmd.engine.errors import SpmdError
from spmd.sharding.auto import choose
from spmd.sharding.sharded_tensor import install

__all__ = ["use_spmd"]


def use_spmd(
    workers: int | Sequence[str] | None = None,
    *,
    auto: bool = False,
    max_programs: int = PROGRAMS,
    device: str | torch.device | None = None,
    copies: int = 0,
    every: int = 10,
) -> None:
    """Begin SPMD mode: ``spmd.device()`` becomes one logical device, whose tensors are on many workers.

    The workers are those of the RPC group, without this process, where ``rpc.init_rpc`` has been called; or,
    under torchrun, all ranks but 0 (rank 0 goes on with the program, and for the others this call never
    returns: they work until rank 0 ends the mode, and then exit); or else processes that are started on this
    machine, and end with the mode.

    Args:
        workers: number of workers; for an RPC group also their names, with devices if a worker has several:
            ``["worker1/cuda:0", "worker1/cuda:1"]``. Each name is a position of meshes, and computes on one
            device. Default: all of the group; on this machine ``FARCALL_SPMD_WORKERS``, else one for each
            core.
        auto: whether to choose shardings that the program does not specify, at the end of the first program
            that changes parameters; see :mod:`spmd.sharding.auto`.
        max_programs: maximum number of recorded programs that the driver and each worker keep, 2 or more. A
            training step with other shapes is another program; a step of more than 1,000 operations is
            several. The programs used last are kept; a program that was dropped is recorded and sent again.
        device: on which each worker computes, as ``"cuda"``; without an index, workers take the devices of
            their host in turn, and random numbers are those that one such device would draw. Default: the
            devices in ``workers``, or the CPU.
        copies: 1 to survive the loss of workers: each one's shards are copied to the next worker, and if one
            is lost, another takes its place: a process that is started on this machine, or a worker of the
            RPC group that has none. What was computed since the last copy is computed again, and is the
            same. 0: the loss of a worker ends the mode.
        every: number of programs, such as training steps, after which the shards are copied, with
            ``copies=1``. At most ``every`` + 1 programs are computed again.

    Raises:
        ValueError: ``max_programs`` is less than 2, ``copies`` is not 0 or 1, or ``every`` is less than 1.
        TypeError: ``workers`` is a bool: XLA's first argument is ``auto``.
        AlreadyInSpmdModeError: it has been called.
        SpmdError: there are not as many workers, or a worker has a process group of its own already, or no
            such device; or devices are of several types.

    Example::

        spmd.use_spmd(workers=4)
        model = model.to(spmd.device())
    """
    if isinstance(workers, bool):
        raise TypeError(
            f"expected a number of workers or their names, got {workers}: did you mean auto={workers}?"
        )
    if max_programs < 2:
        raise ValueError(f"expected max_programs of 2 or more, got {max_programs}")
    if copies not in (0, 1) or every < 1:
        raise ValueError(f"expected copies of 0 or 1, and every of 1 or more, got {copies} and {every}")
    start.use_spmd(workers, max_programs, device, every if copies else 0)
    install(LogicalTensor)
    try:
        torch.zeros((), device=start.device(), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # PyTorch's engine counts devices once
        start.shutdown()
        raise SpmdError(
            "this process has computed gradients before use_spmd(), and PyTorch takes no new device after "
            "that: call use_spmd() before the first backward"
        ) from error
    if auto:
        choose()
