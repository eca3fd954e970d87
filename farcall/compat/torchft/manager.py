"""``torchft.manager``: a ``Manager`` is a member of an elastic job, and a quorum is an attempt at a step.

As with torchft, the program goes on with its next batch after an attempt that is not committed. Unlike
there, steps are committed on all members or on none.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import rpc
from rpc.errors import InvalidOptionError, RpcError
from rpc.runtime.current import current_agent, is_initialized
from spmd.elastic.attempt import Attempt
from spmd.elastic.errors import ElasticError, Finished
from spmd.elastic.job import Job
from spmd.elastic.sampling import Sampler
from spmd.elastic.state import State

__all__ = ["Manager", "WorldSizeMode"]

logger = logging.getLogger(__name__)

_DEFAULT: Final = "default"


class WorldSizeMode(Enum):
    """Whether the number of participants may change: only ``DYNAMIC`` is supported."""

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class _State(State):
    """The state of a manager's program, which changes only when a step is committed."""

    def __init__(self, manager: Manager) -> None:
        super().__init__({})
        self._manager = manager

    def describe(self) -> str:
        return "a program with torchft's names"

    def keep(self) -> None:
        """Copy nothing: the program goes on after an attempt that is not committed."""

    def put_back(self) -> None:
        """Put back nothing."""

    def give(self) -> dict[str, Any]:
        functions = self._manager.state_functions
        return {
            "counts": self._manager.counts,
            "user": {name: save() for name, (_, save) in functions.items()},
        }

    def load(self, given: Any) -> None:
        self._manager.counts = given["counts"]
        for name, (load, _) in self._manager.state_functions.items():
            load(given["user"][name])


class _Reduction(dist.Work):
    """A sum, whose failure the step's end shows."""

    def __init__(self, attempt: Attempt, tensor: torch.Tensor) -> None:
        super().__init__()
        self._attempt, self._tensor = attempt, tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._attempt.finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensor)
        return future


class Manager:
    """A member of the elastic job of this worker's dynamic RPC group, with torchft's interface.

    Joins the group where ``farcall launch --dynamic`` has the workers meet, if ``init_rpc`` has not been
    called, and becomes a member of the job with the first quorum. ``RANK`` is the number of the replica.
    Arguments that are not listed, such as timeouts, addresses and transports, have no effect.

    Args:
        pg: names a kind of process group.
        load_state_dict, state_dict: load and return the program's state: weights and optimizer.
        min_replica_size: number of members without which no step is tried.
        world_size: number of workers of a replica; only 1 is supported.
        world_size_mode: only ``DYNAMIC`` is supported.

    Raises:
        InvalidOptionError: an option is not supported.
        ElasticError: the group is not dynamic, or this process has another job.
    """

    def __init__(
        self,
        pg: object = None,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta | None = None,
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: Any = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str = "",
        heartbeat_interval: timedelta | None = None,
        checkpoint_transport: object = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
    ) -> None:
        if world_size not in (None, 1):
            raise InvalidOptionError(f"Manager: world_size is {world_size}: replicas have one worker here")
        if getattr(world_size_mode, "name", "") != "DYNAMIC":
            raise InvalidOptionError(f"Manager: {world_size_mode} is not supported: only DYNAMIC is")
        self.state_functions: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {}
        if load_state_dict is not None and state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)
        self._replica = replica_id or f"replica{os.environ.get('RANK', os.getpid())}"
        if not is_initialized():
            rpc.init_rpc(self._replica, rpc_backend_options=rpc.AgentOptions(dynamic=True))
        self.counts = (0, 0)  # steps before those of the job, and committed batches
        self._attempt: Attempt | None = None
        self._participants: list[int] = []
        self._error: Exception | None = None
        self._job = Job(Sampler(1, 1), min_replica_size, _State(self))
        self._has_entered = False

    def _end(self, error: Finished) -> SystemExit:
        print(f"farcall: {error}", file=sys.stderr)
        rpc.shutdown()
        return SystemExit(0)

    # ---- the state

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], object], state_dict: Callable[[], Any]
    ) -> None:
        """Add functions that load and return a part of the state.

        Raises:
            ValueError: there are functions under this key.
        """
        if key in self.state_functions:
            raise ValueError(f"Manager: functions of the state {key!r} are registered already")
        self.state_functions[key] = load_state_dict, state_dict

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], object], state_dict: Callable[[], Any]
    ) -> None:
        """Set the functions that load and return the program's state."""
        self.state_functions[_DEFAULT] = load_state_dict, state_dict

    def allow_state_dict_read(self) -> None:
        """Have no effect: the state is read only while a step is tried, in which it does not change."""

    def disallow_state_dict_read(self) -> None:
        """Have no effect."""

    def state_dict(self) -> dict[str, int]:
        """Return the numbers of steps and batches, for checkpoints."""
        return {"step": self.current_step(), "batches_committed": self.batches_committed()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from the numbers of a checkpoint; before the first step, on all members alike."""
        self.counts = state_dict["step"] - self._job.step, state_dict["batches_committed"]

    # ---- steps

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step with the members that are there. A newcomer loads the state first.

        An attempt that has not been ended by ``should_commit`` is given up, on all members.

        Raises:
            SystemExit: the job has ended before this worker had its state; the status is 0.
            ElasticError: as ``elastic.join``, in the first call; or the manager was shut down.
        """
        if self._attempt is not None:
            self.report_error(RuntimeError("start_quorum was called before should_commit"))
            self.should_commit()
        try:
            if not self._has_entered:
                self._job.enter(current_agent().options.rendezvous_timeout)
                self._has_entered = True
            attempt = self._job.next_attempt()
        except Finished as error:
            raise self._end(error) from None
        if attempt is None:
            raise ElasticError(f"'{self._replica}' has left the job: its manager was shut down")
        self._attempt, self._error = attempt, None
        view = attempt.whole_view
        self._participants = [view.members[rank] for rank in view.contributors(attempt.step)]
        attempt.weight = 1 / self.num_participants() if self.is_participating() else 0.0
        attempt.__enter__()

    def wait_quorum(self) -> None:
        """Return at once: ``start_quorum`` has waited."""

    def _current(self) -> Attempt:
        if self._attempt is None:
            raise RuntimeError("no step is in progress: call start_quorum, or zero_grad of the Optimizer")
        return self._attempt

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = dist.ReduceOp.AVG
    ) -> dist.Work:
        """Begin to average a tensor over the participants, in place. If that fails, the step is not
        committed, and the work succeeds.

        Args:
            tensor: the tensor.
            should_quantize: has no effect.
            reduce_op: ``AVG`` or ``SUM``.

        Raises:
            ValueError: the operation is another one.
        """
        if reduce_op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(f"Manager.allreduce: {reduce_op} is not supported: AVG and SUM are")
        attempt = self._current()
        if not self.is_participating():
            tensor.zero_()
        elif reduce_op == dist.ReduceOp.AVG:
            tensor.div_(self.num_participants())
        attempt.start(tensor)
        return _Reduction(attempt, tensor)

    def average_gradients_of(self, module: nn.Module) -> None:
        """Average the gradients of an ``elastic.DistributedDataParallel`` from the next step on."""
        self._job.sum_gradients_of(module)

    def report_error(self, e: Exception) -> None:
        """Record an error, after which this step is not committed, on any member."""
        self._error = e

    def errored(self) -> Exception | None:
        """Return the error that keeps this step from being committed, as far as this member knows."""
        if self._error is None and self._attempt is not None and self._attempt.has_failed:
            return RuntimeError("a reduction has failed")
        return self._error

    def wrap_future(
        self, fut: torch.futures.Future[Any], default: Any, timeout: timedelta | None = None
    ) -> torch.futures.Future[Any]:
        """Return a future that has the default where another one fails, which is reported."""

        def value(done: torch.futures.Future[Any]) -> Any:
            try:
                return done.value()
            except Exception as error:
                self.report_error(error)
                return default

        return fut.then(value)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step; whether it is committed, on all members alike.

        Raises:
            PutOut: the job may go on without this worker.
            StateLostError: all members that had the state are gone.
            StepFailedError: another member has failed.
        """
        attempt = self._current()
        if self._error is not None:
            logger.warning("'%s' gives step %d up: %r", self._replica, self.current_step(), self._error)
            attempt.give_up(f"{type(self._error).__name__}: {self._error}")
        self._attempt = None
        attempt.__exit__(None, None, None)
        if attempt.committed:
            self.counts = self.counts[0], self.counts[1] + self.num_participants()
        return attempt.committed

    # ---- the members

    def current_step(self) -> int:
        """Return the number of committed steps."""
        return self.counts[0] + self._job.step

    def batches_committed(self) -> int:
        """Return the number of batches in committed steps, one for each participant."""
        return self.counts[1]

    def num_participants(self) -> int:
        """Return the number of members that contribute to the step, or did to the last one."""
        return len(self._participants)

    def participating_rank(self) -> int | None:
        """Return this member's rank among them; None for a newcomer, which observes its first step."""
        me = self._job.incarnation
        return self._participants.index(me) if me in self._participants else None

    def is_participating(self) -> bool:
        """Whether this member contributes to the step."""
        return self.participating_rank() is not None

    def replica_id(self) -> str:
        """Return the name of this replica."""
        return self._replica

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, and the RPC group. Idempotent."""
        if not is_initialized():
            return
        try:
            if self._has_entered:
                self._job.leave()
        except RpcError as error:
            logger.warning("'%s' has left without the others' knowledge: %s", self._replica, error)
        rpc.shutdown()
