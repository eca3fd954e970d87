"""``spmd.use_spmd`` and the end of SPMD mode: starting and ending the workers."""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

import rpc
from rpc.agent.waiting import wait_futures
from rpc.errors import RpcError, RpcTimeoutError, WorkerLostError
from rpc.lifecycle.worker_processes import WorkerProcesses
from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.current import current_agent, is_initialized
from rpc.runtime.interrupts import interruptible
from spmd.collectives.creation import refuse
from spmd.collectives.store import WorkerStore
from spmd.engine.driver.copies import Copies, RemoteWorker, UnrecoverableError
from spmd.engine.driver.current import DEVICE, set_engine
from spmd.engine.driver.device import set_up
from spmd.engine.driver.logical_tensor import LogicalTensor, in_message
from spmd.engine.driver.report import LayoutReport, report_of
from spmd.engine.driver.session import PROGRAMS, Session
from spmd.engine.driver.worker_devices import WorkerDevice, on_device, workers_and_devices
from spmd.engine.errors import AlreadyInSpmdModeError, NotInSpmdModeError, SpmdError
from spmd.engine.worker.served_worker import make
from spmd.engine.worker.worker_process import await_driver, await_end_of, serve
from spmd.workers.members import await_members
from spmd.workers.worker_set import wait_together

__all__ = [
    "device",
    "global_device_count",
    "is_spmd",
    "report",
    "shutdown",
    "strict",
    "sync",
    "use_spmd",
    "worker_names",
]

_ALONE: Final = (
    "SPMD mode cannot be mixed with other ways to use several workers: its one driver drives all of them, so "
    "leave out init_process_group() and what is built on it, such as DistributedDataParallel"
)

_DRIVER: Final = "driver"

_EXTENSION: Final = "spmd.session"
"""Name among the agent's extensions under which observers find the session."""

_PATIENCE: Final = 10.0
"""Timeout in seconds for a worker to end."""

_JOINING_SECONDS: Final = 120.0
"""Timeout in seconds for a worker that has started to join the group."""


class _Mode:
    """SPMD mode, from ``use_spmd`` to ``shutdown``.

    Attributes:
        session: the session with its workers.
        processes: the processes that were started for it, if any.
        owns_agent: whether the agent was started for it.

    Args:
        workers: the workers, and where they compute.
        programs: maximum number of programs that are kept.
        every: number of programs after which the workers' values are copied; 0: never.
    """

    def __init__(
        self,
        workers: Sequence[WorkerDevice],
        owns_agent: bool,
        processes: WorkerProcesses | None = None,
        programs: int = PROGRAMS,
        every: int = 0,
    ) -> None:
        self.processes = processes
        self.owns_agent = owns_agent
        self._workers = list(workers)
        self._name = f"spmd-{secrets.token_hex(8)}"
        current_agent().serializer.register_reducer(LogicalTensor, in_message)
        names = self._names()
        calls = [self._make(rank) for rank in range(len(names))]
        try:
            made = wait_together(calls, partial(_give_up, names[0], self._name))
        except WorkerLostError as error:
            said = f"SPMD mode could not begin: worker '{error.worker}' is gone: {error.reason}"
            raise WorkerLostError(said, error.worker, error.reason) from None
        self.ports = [RemoteWorker(name, worker) for name, worker in zip(names, made, strict=True)]
        state = torch.get_rng_state()
        wait_futures([each.worker.rpc_async().seed(state) for each in self.ports])
        self.session = Session(self.ports, LogicalTensor, programs)
        if every:
            self.session.begin_copies(Copies(self.ports, every, self._replace))
        self._extensions: dict[str, Any] = current_agent().extensions
        self._extensions[_EXTENSION] = self.session
        self.session.on_accelerators = any(each.device is not None for each in workers)

    def _names(self) -> list[str]:
        return [each.worker for each in self._workers]

    def _make(self, rank: int, generation: int = 0, first: int = 0) -> Any:
        """Have a worker of the RPC group become one of the mode; returns a future of a reference to it."""
        own, worker = rpc.get_worker_info().name, self._workers[rank]
        args = (own, self._names(), rank, self._name, worker.device, generation, first)
        return rpc.rpc_async(worker.worker, make, args=args, timeout=0)

    @interruptible
    def _replace(self, lost: Sequence[int], generation: int, first: int) -> list[RemoteWorker]:
        """Have other workers take the places of lost ones; see ``Replace``."""
        for rank in lost:
            name = self._spare() if self.processes is None else self._started(self.processes, rank)
            self._workers[rank] = WorkerDevice(name, self._workers[rank].device)
        names = self._names()
        calls = [
            self._make(rank, generation, first)
            if rank in lost
            else port.worker.rpc_async(timeout=0).regroup(generation, names)
            for rank, port in enumerate(self.ports)
        ]
        made = wait_together(calls, partial(_give_up, names[0], f"{self._name}/{generation}"))
        for rank in lost:
            self.ports[rank] = RemoteWorker(names[rank], made[rank])
        return self.ports

    def _started(self, processes: WorkerProcesses, rank: int) -> str:
        """Start another process for a place; returns the name of its worker."""
        name = f"spmd{rank}-{secrets.token_hex(2)}"
        processes.replace(rank, name)
        await_members([name], _JOINING_SECONDS)
        return name

    def _spare(self) -> str:
        """Return a worker of the RPC group that has no place."""
        agent: Any = current_agent()
        used = {*self._names(), agent.get_worker_info().name}
        names = [each.name for each in agent.get_worker_infos() if each.name not in used]
        spares = sorted(each for each in names if agent.group.peers.find(each).lost is None)
        if not spares:
            raise UnrecoverableError("this RPC group has no further worker that could take its place")
        return str(spares[0])

    def end(self) -> None:
        """Release the workers."""
        self._extensions.pop(_EXTENSION, None)
        self.session.end()
        for port in self.ports:
            with suppress(RpcError):  # it is gone, and its values with it
                port.worker.rpc_sync(timeout=_PATIENCE).close()
        self.ports.clear()
        if self.owns_agent and is_initialized():
            with suppress(RpcTimeoutError):  # then the processes are ended
                rpc.shutdown(timeout=_PATIENCE)
        if self.processes is not None:
            self.processes.end(_PATIENCE)


def _give_up(worker: str, name: str, reason: str) -> None:
    """End the workers that wait for others to begin."""
    store = WorkerStore(worker, f"{name}/")
    store.set_timeout(timedelta(seconds=_PATIENCE))
    store.give_up(f"SPMD mode could not begin: {reason}")


_mode: _Mode | None = None


def use_spmd(
    workers: int | Sequence[str] | None = None,
    programs: int = PROGRAMS,
    device: str | torch.device | None = None,
    every: int = 0,
) -> Session:
    """Begin SPMD mode: see :func:`spmd.sharding.mode.use_spmd`. Returns its session.

    Args:
        every: number of programs after which the workers' values are copied; 0: never.
    """
    global _mode
    if _mode is not None:
        raise AlreadyInSpmdModeError(
            f"SPMD mode has {_mode.session.workers} workers already: call spmd.shutdown() before another "
            "use_spmd()"
        )
    if dist.is_initialized() and dist.get_backend() == "farcall":
        raise SpmdError(f"this process is in a process group of farcall's already. {_ALONE}")
    of_workers = None if device is None else str(device)
    set_up()
    if is_initialized():
        members = _members(workers, of_workers)
        if every and len({each.worker for each in members}) < len(members):
            raise SpmdError(
                "copies=1 needs a worker for each position, and some are on devices of one worker"
            )
        _mode = _Mode(members, owns_agent=False, programs=programs, every=every)
    elif "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ:
        if every:
            raise SpmdError(
                "copies=1 has lost workers replaced, which torchrun does not do: it ends all ranks. Start "
                "the program without torchrun, or its workers by farcall launch --dynamic"
            )
        _mode = _under_torchrun(workers, programs, of_workers)
    else:
        _mode = _on_this_machine(workers, programs, of_workers, every)
    set_engine(_mode.session)
    refuse(lambda: SpmdError(_ALONE))
    atexit.register(shutdown)
    return _mode.session


def _members(workers: int | Sequence[str] | None, device: str | None) -> list[WorkerDevice]:
    """Return the workers of the RPC group, and where they compute."""
    agent: Any = current_agent()
    own = agent.get_worker_info().name
    names = [each.name for each in agent.get_worker_infos() if each.name != own]
    if isinstance(workers, int) or workers is None:
        count = len(names) if workers is None else workers
        if not 0 < count <= len(names):
            raise SpmdError(f"expected up to {len(names)} workers, the others of this RPC group, got {count}")
        return on_device(names[:count], device)
    return workers_and_devices(workers, names, device)


def _on_this_machine(
    workers: int | Sequence[str] | None, programs: int, device: str | None, every: int
) -> _Mode:
    if workers is None:
        said = os.environ.get("FARCALL_SPMD_WORKERS") or str(len(os.sched_getaffinity(0)))
        if not said.isdecimal() or not int(said):
            raise SpmdError(f"FARCALL_SPMD_WORKERS is {said!r}: expected the number of workers, 1 or more")
        workers = int(said)
    if not isinstance(workers, int) or workers < 1:
        raise SpmdError(
            f"expected the number of workers, 1 or more, got {workers!r}. Names are those of workers of an "
            "RPC group: call rpc.init_rpc first"
        )
    names = [f"spmd{rank}" for rank in range(workers)]
    threads = max(1, usable_cores() // workers)
    size = None if every else workers + 1
    processes = WorkerProcesses(names, size, threads=threads, serves=True)
    try:
        if every:
            processes.start(await_end_of, (_DRIVER,))
        else:
            processes.start(await_driver, ())
        try:
            processes.started()
        except RpcError as error:
            raise SpmdError(f"SPMD mode could not begin: worker {error}") from error.__cause__
        rpc.init_rpc(_DRIVER, None, -1 if every else workers, size, processes.options())
        if every:
            await_members(names, _JOINING_SECONDS)
        return _Mode(on_device(names, device), True, processes, programs, every)
    except BaseException:
        processes.end()
        raise


def _under_torchrun(workers: int | Sequence[str] | None, programs: int, device: str | None) -> _Mode:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2 or workers not in (None, size - 1):
        raise SpmdError(
            f"under torchrun with {size} processes rank 0 is the driver, and the other {size - 1} are its "
            f"workers; asked for {workers}"
        )
    if rank:
        serve(f"spmd{rank - 1}", rank)
    rpc.init_rpc(_DRIVER)
    names = [f"spmd{each}" for each in range(size - 1)]
    return _Mode(on_device(names, device), owns_agent=True, programs=programs)


def shutdown() -> None:
    """End SPMD mode: workers free their values, and those that were started for it end. Idempotent.

    Tensors on the device are lost; call ``.cpu()`` before on those that must be kept.
    """
    global _mode
    mode, _mode = _mode, None
    if mode is None:
        return
    atexit.unregister(shutdown)
    set_engine(None)
    refuse(None)
    mode.end()


def _current() -> _Mode:
    if _mode is None:
        raise NotInSpmdModeError("SPMD mode has not begun, or has ended: call spmd.use_spmd() first")
    return _mode


def is_spmd() -> bool:
    """Whether SPMD mode is on."""
    return _mode is not None


def global_device_count() -> int:
    """Return the number of workers.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
    """
    return _current().session.workers


def worker_names() -> list[str]:
    """The workers' names in the RPC group, by number.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
    """
    return [port.name for port in _current().ports]


def device() -> torch.device:
    """The logical device.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
    """
    _current()
    return DEVICE


def report() -> LayoutReport:
    """Return what was replicated or redistributed because operations required it, since the mode began.

    Sums that workers held in parts, and moves that the program asked for, do not count.

    Raises:
        NotInSpmdModeError: SPMD mode is off.

    Example::

        print(spmd.report())    # train.py:41 in forward: aten::batch_norm, 10 times, 12.000 MB: ...
    """
    return report_of(_current().session.recorder)


@contextmanager
def strict() -> Iterator[None]:
    """Raise an error inside the block for everything that ``report`` would list.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
        ReshardingError: raised by an operation inside that needs another layout of a tensor.

    Example::

        with spmd.strict():
            loss = model(batch)
    """
    recorder = _current().session.recorder
    before, recorder.strict = recorder.strict, True
    try:
        yield
    finally:
        recorder.strict = before


def sync() -> None:
    """Run what is recorded, and wait until all workers have done it.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
        OperationError: an operation has failed; says which, and the line that asked for it.
        WorkerLostError: a worker is gone, and the mode with it.
    """
    _current().session.sync()
