"""The worker's side of the ``run_workers`` fixture: what a function running in a worker is given."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from tests.support import backend, default_device


@dataclass(frozen=True)
class WorkerSpec:
    """The identity of a worker; see :class:`Worker` for what the fields mean."""

    name: str
    rank: int
    world_size: int
    init_method: str
    folder: Path


class Worker:
    """One worker, as the function running in it sees it: who it is, and its line to the test.

    Attributes:
        name: ``"worker0"``, ``"worker1"`` and so on, unless the test chose another.
        rank: from 0.
        world_size: how many workers the run was started with.
        init_method: a ``file://`` rendezvous of this run alone, in the test's folder.
        folder: the test's ``tmp_path``, also the current directory.

    Any thread may report. One thread at a time waits.
    """

    def __init__(self, spec: WorkerSpec, channel: Connection[Any, Any]) -> None:
        self.name = spec.name
        self.rank = spec.rank
        self.world_size = spec.world_size
        self.init_method = spec.init_method
        self.folder = spec.folder
        self._channel = channel
        self._sending = threading.Lock()
        self._arrived: defaultdict[str, deque[Any]] = defaultdict(deque)

    def report(self, event: str, value: object = None) -> None:
        """Tells the test that something happened; the test gets it with ``workers[i].wait_for(event)``."""
        self.post(("event", event, value))

    def wait_for(self, event: str) -> Any:
        """Waits until the test does ``workers[i].tell(event, value)`` and returns that value."""
        while not self._arrived[event]:
            name, value = cloudpickle.loads(self._channel.recv_bytes())
            self._arrived[name].append(value)
        return self._arrived[event].popleft()

    def die(self) -> NoReturn:
        """Kills this process with ``SIGKILL``; the test takes this death as intended."""
        self.post(("dying",))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def group(self, **options: Any) -> Iterator[None]:
        """Joins the run's RPC group under this worker's name, and leaves it gracefully at the end.

        Args:
            **options: of ``rpc.options.AgentOptions``, other than the init method; ``dynamic=True`` asks for
                a group without a fixed size.

        If the body raises, the worker leaves at once instead, so that the others notice.
        """
        import rpc

        self.join(**options)
        try:
            yield
        except BaseException:
            rpc.shutdown(graceful=False)
            raise
        rpc.shutdown()

    def join(self, **options: Any) -> None:
        """Joins the run's RPC group, and leaves the leaving to the test; options as for :meth:`group`."""
        import rpc

        # The rendezvous ends before the run does: its error says more.
        given: dict[str, Any] = {"init_method": self.init_method, "rendezvous_timeout": 30.0}
        size = None if options.get("dynamic") else self.world_size
        others = [f"worker{rank}" for rank in range(self.world_size) if rank != self.rank]
        options = default_device.use(given | options, others)
        rpc.init_rpc(self.name, rank=self.rank, world_size=size, **backend.use(options))

    def post(self, message: tuple[Any, ...]) -> None:
        """Sends one message of the fixture's own protocol."""
        data = cloudpickle.dumps(message)
        with self._sending:
            self._channel.send_bytes(data)


_current: Worker | None = None


def current_worker() -> Worker:
    """The worker that this process is; for functions that are called remotely and want to report.

    Raises:
        RuntimeError: this process is not a worker that ``run_workers`` made.
    """
    if _current is None:
        raise RuntimeError("this process was not made by run_workers")
    return _current


def worker_main(descriptor: int) -> int:
    """Receives a function over the channel, runs it, and sends back how it went."""
    global _current
    channel: Connection[Any, Any] = Connection(descriptor)
    task = channel.recv_bytes()
    spec: WorkerSpec = cloudpickle.loads(channel.recv_bytes())
    worker = _current = Worker(spec, channel)
    os.chdir(spec.folder)
    backend.make_default()
    default_device.make_default(spec.rank)
    seed(spec.rank)
    try:
        function: Callable[..., Any]
        function, args, kwargs = cloudpickle.loads(task)
        value = function(worker, *args, **kwargs)
        worker.post(("returned", default_device.to_cpu(value)))
    except BaseException as error:
        _send_error(worker, error)
        return 1
    return 0


def _send_error(worker: Worker, error: BaseException) -> None:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without the fixture's own
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        worker.post(("raised", error, text))
    except BrokenPipeError:
        raise error from None
    except Exception:  # the exception cannot be pickled: its text will have to do
        worker.post(("raised", None, text))


def seed(rank: int) -> None:
    """Random numbers are those of a new process of this rank."""
    random.seed(rank)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.version.cuda:
        torch.manual_seed(rank)
    else:  # ``manual_seed`` takes 3 ms to note where it was called, for each type of device that is not here
        torch.default_generator.manual_seed(rank)
