"""One try at a step: the block that users write, from the member's part of the batch to the commit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch.distributed.distributed_c10d import AllreduceOptions, BroadcastOptions

from rpc.errors import InvalidOptionError, RpcError, SerializationError
from rpc.runtime.waits import waiting
from spmd.collectives.errors import CollectiveMismatchError, CollectiveTimeoutError
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.elastic.agreement import NEW, Outcome, View, Vote
from spmd.elastic.errors import ElasticError, StepFailedError
from spmd.elastic.groups import Groups
from spmd.elastic.reducer import Reducer, accumulating
from spmd.elastic.sampling import Sampler, part_of
from spmd.elastic.state import UNKNOWN_STEPS, State
from spmd.elastic.views import Views
from spmd.torch_internals import c10d_library

__all__ = ["Attempt"]

logger = logging.getLogger(__name__)

_MISTAKES: Final = (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidOptionError,
    SerializationError,
    ElasticError,
)
"""Errors of farcall that would be the same if the attempt were repeated; all others follow from a loss."""


def _is_mistake(error: Exception) -> bool:
    return not isinstance(error, RpcError) or isinstance(error, _MISTAKES)


class _Over(BaseException):
    """Ends the block of an attempt that is repeated. Not an ``Exception``, which the block may catch."""


class Attempt:
    """One try at a step in one view, as a context manager. For the training thread.

    Attributes:
        step: number of the step, from 0.
        view: number of the view.
        size, rank: number of replicas of the view, and the rank of this member's.
        indices: this replica's part of the step's batch: an int64 tensor of indices of samples. It is empty
            in the first step of a newcomer, which only observes it, and if there are more replicas than
            samples.
        part: where in the batch they begin and end; (0, 0) if there are none.
        batch_size: number of samples of the step, over all replicas.
        weight: this replica's share of the batch, from 0 to 1.
        committed: whether the step is committed on all members; False until then, and if it is repeated.
        has_failed: whether a reduction has failed.
        steps: how often this member has called ``step`` of its optimizers.
        cut_short: the exception that has ended the block after the commit, if the replica has lost a worker.
        root: rank of the replica whose buffers all get: the first one that has samples.
        whole_view, groups: the view and its process groups: for the job, see ``Job.group``.
    """

    def __init__(
        self, views: Views, view: View, groups: Groups, step: int, sampler: Sampler, state: State,
        reducers: list[Reducer],
    ) -> None:  # fmt: skip
        self.step, self.view = step, view.number
        self.size, self.rank = view.size, view.rank(views.me)
        contributors = view.contributors(step)
        self.batch_size = sampler.batch_size
        self.indices = torch.empty(0, dtype=torch.int64, device="cpu")
        parts = [part_of(self.batch_size, place, len(contributors)) for place in range(len(contributors))]
        first = next(place for place, each in enumerate(parts) if each.start < each.stop)
        self.root = contributors[first]
        self.part = (0, 0)
        if self.rank in contributors:
            part = parts[contributors.index(self.rank)]
            self.indices = sampler.batch(step)[part].clone()
            self.part = (part.start, part.stop) if len(self.indices) else (0, 0)
        self.weight = len(self.indices) / self.batch_size
        self.committed = False
        self.is_open = False
        self._views, self.whole_view, self.groups = views, view, groups
        self._state, self._reducers = state, reducers
        self._works: list[Any] = []
        self._started = 0
        self.steps = 0
        self.has_failed = False
        self._mistake: BaseException | None = None
        self.cut_short: Exception | None = None

    def __repr__(self) -> str:
        return f"<attempt at step {self.step} in view {self.view}, rank {self.rank} of {self.size}>"

    # ---- the block

    def __enter__(self) -> Self:
        self.is_open = True
        self._state.clear_gradients()
        for reducer in self._reducers:
            reducer.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            return self._end(error)
        finally:
            self.is_open = False
            if self.committed:
                self._state.steps = self.steps
            for reducer in self._reducers:
                reducer.end()

    def _end(self, error: BaseException | None) -> bool:
        if error is None or isinstance(error, _Over):
            if not self.committed and error is None:
                self._decide()
            return True
        if not isinstance(error, Exception):
            return False  # the process is about to end; the others go on without it
        replica = self._views.replica
        if not self.committed and self._is_lost():
            replica.abort(f"the attempt at step {self.step} has ended early on worker '{self._views.name}'")
            self._await_outcome()  # the error is a consequence
            return True
        if self.committed and self._views.mates.lost():
            self.cut_short = error  # likewise; this member takes part in no other step
            return True
        failed = self.committed or self._views.replica.failed
        if failed and self._views.error is not None and error is not self._mistake:
            raise self._views.error from error
        self.report(error)
        return False

    def _is_lost(self) -> bool:
        """Whether the view has failed, for another reason than a mistake in the block."""
        with self._views.changed:
            over = self._views.outcome is Outcome.ABORT or self._views.core.frozen
        failed = self.has_failed or self.groups.failed or self._views.replica.failed
        return self._mistake is None and (over or failed)

    def report(self, error: BaseException) -> None:
        """End the job on all members."""
        name = self._views.name
        text = f"{type(error).__name__}: {error}"
        failure = StepFailedError(
            f"the elastic job has ended, since worker '{name}' has failed: {text}", name
        )
        self._views.fail(failure, tell=text)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients of backward passes on this member, without summing them over the members.

        Example::

            with attempt:
                first, last = attempt.indices.chunk(2)
                with attempt.accumulate():
                    loss_of(first).backward()
                loss_of(last).backward()  # sums both, over all members
                optimizer.step()
        """
        with accumulating(self._reducers):
            yield

    # ---- reductions

    def start(self, tensor: torch.Tensor, *, blocks: bool = False) -> None:
        """Begin to sum a tensor over the members of the view, in place; with ``blocks``, on this thread.
        After a failure it does nothing.
        """
        if not self.has_failed:
            self._started += 1
            options = AllreduceOptions()
            options.asyncOp = not blocks
            try:
                self._works.append(self.groups.sums.allreduce([tensor], options))
            except Exception as error:
                self._note(error)

    def gather(self, values: Sequence[int], purpose: str) -> list[list[int]]:
        """Return what each member of the view passes, by rank; nothing after a failure.

        Args:
            values: equally many on all members.
            purpose: for observers; the step and the view follow it.
        """
        return self._gather(self.groups.votes, len(self.whole_view.members), values, purpose)

    def _gather(
        self, group: FarcallProcessGroup, size: int, values: Sequence[int], purpose: str
    ) -> list[list[int]]:
        if self.has_failed:
            return []
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(size)]
        group.group.purpose = f"{purpose} step {self.step} of the elastic job, view {self.view}"
        options = c10d_library.AllgatherOptions()
        options.asyncOp = False
        try:
            group.allgather([rows], [mine], options).wait()
        except Exception as error:
            self._note(error)
            return []
        finally:
            group.group.purpose = ""
        return [each.tolist() for each in rows]

    def finish(self) -> None:
        """Wait for all sums. A failure is noted, and decides what becomes of the attempt."""
        works, self._works = self._works, []
        for work in works:
            try:
                work.wait()
            except Exception as error:
                self._note(error)

    def _note(self, error: Exception) -> None:
        self.has_failed = True
        logger.debug("worker '%s': %r has failed: %r", self._views.name, self, error)
        if self._mistake is None and _is_mistake(error):
            self._mistake = error

    def check_uncommitted(self) -> None:
        """Raise if the step is committed: members could not repeat a collective that a loss interrupts."""
        if self.committed:
            raise ElasticError(
                f"a collective was called in the block of step {self.step} after optimizer.step(), which has "
                "committed the step: it could not be repeated if a member were lost. Call it before "
                "optimizer.step(), or in the next attempt"
            )

    # ---- the commit

    def commit(self) -> None:
        """Commit the step on all members; called before an optimizer changes parameters.

        Raises:
            _Over: the attempt is repeated.
        """
        if not self.committed:
            self._decide()
            if not self.committed:
                raise _Over

    def give_up(self, reason: str) -> None:
        """Have the attempt be repeated on all members, since this one is not prepared to commit it."""
        self.has_failed = True
        self.groups.abort(f"the step is given up: {reason}")

    def _check_gradients(self) -> None:
        """Note a mistake if an optimizer would use a gradient that differs between members."""
        if len(self._reducers) < len(self._state.modules):
            return  # a sharded module's gradients are the program's
        for optimizer in self._state.optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.grad is not None and not any(each.sums(parameter) for each in self._reducers):
                    self._note(
                        ElasticError(
                            f"a parameter of shape {tuple(parameter.shape)} has a gradient that is not "
                            "summed over the members, since it did not require gradients, or was not part of "
                            "the state, when this worker called elastic.join: unfreeze parameters before it"
                        )
                    )
                    return

    def _decide(self) -> None:
        self._check_gradients()
        for reducer in self._reducers:
            reducer.finish()
        self.finish()
        if self.groups.sums is not self.groups.votes:
            # A vote in another group would not notice that other members still wait for a sum.
            self._gather(self.groups.sums, self.size, [self._started], "the end of the sums of")
        buffers = self._share_buffers()
        if not self.has_failed:
            self._vote()
        if self._mistake is not None:
            self.report(self._mistake)
            raise self._mistake
        self._await_outcome()
        if self.committed:
            with torch.no_grad():
                for buffer, shared in buffers:
                    buffer.copy_(shared)

    def _share_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each buffer with its value on the member ``root``, which a commit copies into it."""
        shared = []
        for buffer in self._state.buffers():
            value = buffer.detach().clone()
            if not self.has_failed:
                options = BroadcastOptions()
                options.rootRank = self.root
                try:
                    self._works.append(self.groups.sums.broadcast([value], options))
                except Exception as error:
                    self._note(error)
            shared.append((buffer, value))
        self.finish()
        return shared

    def _vote(self) -> None:
        views = self._views
        with views.changed:
            if not views.core.prepare(self.whole_view):
                return
            vote = views.core.vote(grow=views.wants_to_grow())
        values = [vote.step, vote.grow, vote.leave, vote.finish, self._state.steps]
        rows = self.gather(values, "the vote on")
        if not rows:
            return
        steps = [row[-1] for row in rows]
        if len({*steps} - {UNKNOWN_STEPS}) > 1:
            self._note(
                ElasticError(
                    f"in step {self.step - 1}, members have called optimizer.step() {steps} times, by rank "
                    f"({UNKNOWN_STEPS}: not known), so that they differ now: call it alike on all members, "
                    "also for an empty part of the batch"
                )
            )
            return
        votes = [Vote(row[0], *map(bool, row[1:4])) for row in rows]
        with views.changed:
            if views.core.count(self.whole_view, votes):
                views.outcome, views.given_step = Outcome.COMMIT, NEW
                if views.core.hold:
                    views.woken.set()

    def _await_outcome(self) -> None:
        views = self._views
        with views.changed, waiting(f"the outcome of step {self.step} of the elastic job", views.awaited):
            while views.outcome is None and views.error is None and not views.closed:
                views.suspect()
                views.changed.wait(0.5)
            if views.error is not None:
                raise views.error
            if views.closed:
                raise ElasticError("this worker has left the elastic job in the middle of a step")
            self.committed = views.outcome is Outcome.COMMIT
            views.given_step = NEW
