"""``elastic.join``: a training job whose members may die, leave and join at any time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from rpc.errors import InvalidOptionError
from rpc.runtime.current import current_agent
from rpc.runtime.waits import waiting
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.collectives.work import GroupWork
from spmd.elastic.agreement import NEW, Outcome, View
from spmd.elastic.attempt import Attempt
from spmd.elastic.entry import enter
from spmd.elastic.errors import ElasticError
from spmd.elastic.reducer import Reducer
from spmd.elastic.replicas import Replica, find_replica
from spmd.elastic.sampling import Sampler
from spmd.elastic.sharded import is_fully_sharded
from spmd.elastic.state import State
from spmd.elastic.transfer import fetch, in_pieces
from spmd.elastic.views import STATE, Views

__all__ = ["Job", "join"]

logger = logging.getLogger(__name__)

_VERSION = 4
"""Version of what members say to each other."""

_LEAVE_SECONDS = 60.0

_T = TypeVar("_T")


class JobGroup(FarcallProcessGroup):
    """The process group of a view, for programs: of the workers at this one's place in each replica. Its
    operations belong to an attempt.
    """

    job: Job

    def _run(self, *args: Any, **kwargs: Any) -> GroupWork:
        self._check()
        return super()._run(*args, **kwargs)

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> GroupWork:
        self._check()
        return super().send(tensors, to, tag)

    def _receive(self, *args: Any) -> GroupWork:
        self._check()
        return super()._receive(*args)

    def _check(self) -> None:
        attempt = self.job.current
        if attempt is None or not attempt.is_open:
            raise ElasticError(
                "the group of an elastic job is used within `with attempt:` only, since a view may end "
                "between two attempts. torch.nn.parallel.DistributedDataParallel, whose constructor uses it, "
                "cannot go on after a loss: use elastic.DistributedDataParallel(module)"
            )
        attempt.check_uncommitted()


class Job:
    """An elastic job, as one of its members sees it; made by ``join``. For the training thread, except
    ``leave`` and ``finish``, which a signal handler may call, too.

    Attributes:
        current: the attempt under way, or None.
    """

    def __init__(self, sampler: Sampler, min_size: int, state: State, replica: Replica | None = None) -> None:
        self._sampler, self._min_size, self._state = sampler, min_size, state
        _check_parameters(state)
        self._reducers = [Reducer(each) for each in state.modules if not is_fully_sharded(each)]
        self._handles: dict[torch.optim.Optimizer, Any] = {}
        self._callbacks: list[Callable[[Job], object]] = []
        self._reported = 0
        self._group: JobGroup | None = None
        self._is_looping = False
        self.current: Attempt | None = None
        self._replica = find_replica(1) if replica is None else replica
        description = (
            f"version {_VERSION}\n{sampler!r}\nmin_size={min_size}\nreplica_size={self._replica.size}\n"
            f"{STATE}\n{state.describe()}"
        )
        self._views = Views(description, min_size, lambda: in_pieces(state.give()), self._replica)

    def enter(self, timeout: float) -> None:
        """Become a member of the job; see ``join``."""
        enter(self._views, timeout)
        for each in self._reducers:
            each.attach()
        for optimizer in self._state.optimizers:
            self._handles[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    # ---- the job

    @property
    def step(self) -> int:
        """Number of committed steps; 0 for a newcomer that has no state yet."""
        return max(0, self._views.core.step)

    @property
    def members(self) -> list[str]:
        """Names of the workers of the view: replica after replica, by rank."""
        peers = current_agent().group.peers
        return [peer.name if (peer := peers.by_incarnation(each)) else "" for each in self._view.members]

    @property
    def size(self) -> int:
        """Number of replicas of the view."""
        return self._view.size

    @property
    def rank(self) -> int:
        """Rank of this member's replica in the view."""
        return self._view.rank(self._views.me)

    @property
    def view(self) -> int:
        """Number of the view."""
        return self._view.number

    @property
    def _view(self) -> View:
        if self.current is not None and self.current.is_open:
            return self.current.whole_view  # there may be another one while the block still runs
        view = self._views.core.view
        assert view is not None  # ``join`` waits for it
        return view

    @property
    def group(self) -> FarcallProcessGroup:
        """The process group of the attempt's view: the workers at this one's place in each replica, by the
        replicas' ranks. Ask for it in each attempt, and use it there only.
        """
        attempt = self.current
        groups = attempt.groups if attempt is not None and attempt.is_open else self._views.groups
        if groups is None:
            raise ElasticError("this worker has left the elastic job")
        if self._group is None or self._group.group is not groups.sums.group:
            self._group = JobGroup(groups.sums.group)
            self._group.job = self
        return self._group

    @property
    def replica(self) -> FarcallProcessGroup:
        """The process group of this member's replica, for a ``DeviceMesh``; the rank in it is the place."""
        if self._replica.group is None:
            raise ElasticError(
                "the replicas of this job are single workers, which have no process group: pass replica_size "
                "to elastic.join"
            )
        return self._replica.group

    def all_reduce_hook(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the replicas of the view, in place, as part of the attempt: for FSDP2's
        ``set_all_reduce_hook``. That of a newcomer, which observes the step, counts as zero.
        """
        if self.current is None or not self.current.is_open:
            raise ElasticError("all_reduce_hook belongs to an attempt: call it within `with attempt:`")
        self.current.check_uncommitted()
        if self.current.weight == 0.0:
            tensor.zero_()
        self.current.start(tensor, blocks=True)
        self.current.finish()

    # ---- attempts

    def attempts(self, until: int | None = None) -> Iterator[Attempt]:
        """Yield attempts until ``until`` steps are committed, a member calls ``finish``, or this one leaves.

        Use each as a context manager. Within its block everything that changes the state must follow from the
        step, since the block is run again if a member is lost: use ``attempt.indices`` in place of an
        iterator over a loader. If this raises in a newcomer that has no state yet, its modules may be left
        half filled.

        Args:
            until: number of steps of the whole job; None for no limit.

        Raises:
            Finished: the job has ended before this worker had its state.
            StepFailedError: the block has raised an exception on another member.
            PutOut: the job may go on without this worker.
            StateLostError: all members that had the state are gone.
            ElasticError: ``min_size`` members have not come in time.
        """
        if self._state.keeps_all:
            raise ElasticError("this job trains locally: use the rounds of its LocalSGD or DiLoCo")
        return self.loop(lambda attempt: attempt, until)

    def loop(self, make: Callable[[Attempt], _T], until: int | None) -> Iterator[_T]:
        """Yield what ``make`` makes of each attempt; for ``attempts`` and the rounds of ``LocalSGD``."""
        self._is_looping = True
        cut_short: Exception | None = None
        try:
            while (attempt := self._begin(until)) is not None:
                yield (made := make(attempt))
                self.current, cut_short = None, cut_short or attempt.cut_short
                with self._views.changed:
                    if self._views.outcome is None:
                        raise ElasticError(f"{made!r} was not used: write `with` in the loop")
                    aborted = self._views.outcome is Outcome.ABORT
                if aborted and not self._state.keeps_all:
                    self._state.put_back()
                    logger.debug("worker '%s' repeats step %d", self._views.name, attempt.step)
        finally:
            self._is_looping, self.current = False, None
        core = self._views.core
        self._views.check_ended()
        if cut_short or not (core.ended or core.leaving or (until is not None and core.step >= until)):
            self._views.check_replica(cut_short)
        if core.left or core.leaving:
            self.leave()

    @property
    def incarnation(self) -> int:
        """This worker's incarnation, as the view has it."""
        return self._views.me

    def sum_gradients_of(self, module: torch.nn.Module) -> None:
        """Sum the gradients of a module that is not part of the state, from the next attempt on."""
        reducer = Reducer(module)
        reducer.attach()
        self._reducers.append(reducer)

    def next_attempt(self) -> Attempt | None:
        """Begin an attempt for a program without a loop over attempts; None if this member has left.

        Raises:
            Finished: the job has ended before this worker had its state.
        """
        attempt = self._begin(None)
        if attempt is None:
            self._views.check_ended()
        return attempt

    def again(self, until: int | None) -> Attempt | None:
        """Begin another attempt at the step of the last one, whose local steps are not repeated."""
        return self._begin(until, keep=False)

    def _begin(self, until: int | None, *, keep: bool = True) -> Attempt | None:
        views, core = self._views, self._views.core
        while True:
            with views.changed:
                if not self._wait_until_ready(until):
                    return None
                view, groups = self._view, views.groups
                assert groups is not None
                is_new = core.step == NEW
                step = view.first if is_new else core.step
                views.outcome = None
            if view.number != self._reported:
                self._reported = view.number
                for callback in self._callbacks:
                    callback(self)
            if is_new and not self._load(view):
                continue
            if self._replica.size > 1:
                if not views.mates.begin_together(view, step):
                    continue
                self._replica.use(groups.replica)
            if keep:
                self._state.keep()
            with views.changed:
                if views.error is not None:  # it has ended the replica's operations, perhaps before ``use``
                    raise views.error
                views.given_step = step
                views.changed.notify_all()
            self.current = Attempt(views, view, groups, step, self._sampler, self._state, self._reducers)
            return self.current

    def _wait_until_ready(self, until: int | None) -> bool:
        """Wait until an attempt may begin; false if there is none any more. With ``changed`` held."""
        views, core = self._views, self._views.core
        patience = current_agent().options.rendezvous_timeout

        def is_over() -> bool:
            at_end = until is not None and core.step >= until
            return bool(core.left or core.ended or at_end or views.closed or views.error)

        def is_ready() -> bool:
            return is_over() or (core.may_begin and self.size >= self._min_size)

        with waiting(
            f"the next view of the elastic job, which needs {self._min_size} {self._what}", views.awaited
        ):
            while not views.changed.wait_for(is_ready, patience):
                if core.may_begin:
                    raise ElasticError(
                        f"the elastic job has {self.size} {self._what}, fewer than "
                        f"min_size={self._min_size}, and no others have come within {patience:g} s"
                    )
        if views.error is not None:
            raise views.error
        return not is_over()

    @property
    def _what(self) -> str:
        return "members" if self._replica.size == 1 else "replicas"

    def _load(self, view: View) -> bool:
        """Load the state from a neighbour; false if the view ends meanwhile."""
        fetched = fetch(self._views, view, self._state.rooms())
        if fetched is not None:
            self._state.load(fetched[1])
        with self._views.changed:
            if fetched is not None and self._views.core.load(view, view.first, fetched[0]):
                return True
            self._views.outcome = self._views.outcome or Outcome.ABORT
        self._views.suspect()
        return False

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._views.closed:
            return
        if self.current is None or not self.current.is_open:
            if self._state.keeps_all:
                raise ElasticError(
                    f"the {type(optimizer).__name__} of the state cannot take local steps: only the "
                    "optimizer that LocalSGD or DiLoCo was made with can. Add this one's parameters to that "
                    "one, or leave this one out of elastic.join"
                )
            raise ElasticError(
                "optimizer.step() was called outside of an attempt: members would differ. Call it within "
                "`with attempt:`"
            )
        if args[1:] or kwargs.get("closure") is not None:
            raise ElasticError("optimizer.step(closure) would compute gradients after the step was committed")
        self.current.commit()
        self.current.steps += 1

    # ---- local training

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is part of the state."""
        return optimizer in self._state.optimizers

    def train_locally(self, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        """Sum no gradients, and let an optimizer step between attempts; for ``LocalSGD`` and ``DiLoCo``."""
        if self._replica.size > 1:
            raise ElasticError("LocalSGD and DiLoCo need replicas of one worker: leave replica_size out")
        if model not in self._state.modules:
            raise ElasticError("the model is not in the job's state: pass it to elastic.join")
        averaged = {each for each in model.parameters() if each.requires_grad}
        others = (each for other in self._state.modules for each in other.parameters())
        stepped = (each for group in inner.param_groups for each in group["params"])
        for what, parameters in (("another module of the state", others), ("the optimizer", stepped)):
            for each in parameters:
                if each.requires_grad and each not in averaged:
                    raise ElasticError(
                        f"{what} has a parameter of shape {tuple(each.shape)} that requires gradients and is "
                        "not one of the model's: it would not be averaged, so members would differ. Pass one "
                        "module that has both as parts, or call requires_grad_(False) on what is not trained"
                    )
        if self._is_looping or self._views.outcome is Outcome.COMMIT or self._state.keeps_all:
            raise ElasticError("local training begins before the first attempt of a job, and once")
        self._state.keeps_all = True
        for each in self._reducers:
            each.detach()
        self._reducers = []
        if inner in self._handles:
            self._handles.pop(inner).remove()

    # ---- the end

    def leave(self) -> None:
        """Leave the job.

        Within the loop, this member leaves after the step, with its replica, and the others lose nothing.
        After the loop it returns when the others go on without this member, or the job is over.
        """
        with self._views.changed:
            if self._is_looping:
                self._views.core.leaving = True
                return
        self._views.leave(_LEAVE_SECONDS)
        for each in self._reducers:
            each.detach()
        for handle in self._handles.values():
            handle.remove()

    def finish(self) -> None:
        """End the job on all members, after the step that is committed next with this member's vote."""
        with self._views.changed:
            self._views.core.finishing = True

    def on_view(self, callback: Callable[[Job], object]) -> None:
        """Have ``callback(job)`` called before the first attempt in each view, on the training thread."""
        self._callbacks.append(callback)


def _check_parameters(state: State) -> None:
    """Raise if the gradient of a parameter would not be summed, or be summed twice."""
    if any(map(is_fully_sharded, state.modules)):
        return  # sums are the program's, by ``all_reduce_hook``
    module_of: dict[torch.nn.Parameter, torch.nn.Module] = {}
    for module in state.modules:
        for name, parameter in module.named_parameters():
            if module_of.setdefault(parameter, module) is not module:
                raise ElasticError(
                    f"elastic.join: parameter '{name}' is part of two modules of the state: its gradient "
                    "would be summed twice. Pass one module that has both as parts"
                )
        if state.modules.count(module) > 1:
            raise ElasticError(
                f"elastic.join: a {type(module).__name__} is in the state twice: its gradients would be "
                "summed twice. Pass it once"
            )
    for optimizer in state.optimizers:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter not in module_of:
                raise ElasticError(
                    f"elastic.join: the {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is part of no module of the state: its gradient would "
                    "not be summed over the members. Pass the module, or an nn.ParameterList"
                )


def join(
    *,
    sampler: Sampler,
    min_size: int = 1,
    replica_size: int = 1,
    **state: Any,
) -> Job:
    """Join the elastic job of this worker's dynamic RPC group, or found it.

    Returns when this worker is a member. A newcomer gets the state of the job in its first attempt, from
    other members. If the job ends or they die in the middle, its modules may be left half filled.

    Args:
        sampler: draws the samples of each step; the same on all members.
        min_size: number of replicas without which no step is tried.
        replica_size: number of workers of a replica, which train together and are lost together. It is formed
            as ``elastic.replica`` says, which a program calls first if it shards the model.
        state: the objects that make up the state, by name: modules, optimizers, and any others with
            ``state_dict`` and ``load_state_dict``. Gradients of the modules are summed over the members.

    Raises:
        Finished: the job has ended.
        PutOut: the replica has lost a worker before it took part.
        JobMismatchError: other members have another model, optimizer, sampler or option.
        ElasticError: the RPC group is static; this process is a member already; a parameter is part of two
            modules, or of an optimizer and no module; or ``min_size`` replicas have not come, or the other
            workers of the replica, within the option ``rendezvous_timeout``.
        InvalidOptionError: an option has a value that it cannot have.
        TypeError: an object in ``state`` has no ``state_dict``.

    Example::

        rpc.init_rpc(f"trainer{rank}")  # a dynamic group
        job = elastic.join(model=model, optimizer=optimizer, sampler=elastic.Sampler(len(x), batch_size=48))
        for attempt in job.attempts(until=1000):
            with attempt:
                i = attempt.indices
                loss = loss_fn(model(x[i]), y[i], reduction="sum") / attempt.batch_size
                loss.backward()
                optimizer.step()
        job.leave()
    """
    for name, number in (("min_size", min_size), ("replica_size", replica_size)):
        if type(number) is not int or number < 1:
            raise InvalidOptionError(f"elastic.join: {name} is {number!r}; it must be a positive integer")
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"elastic.join: sampler is of type {type(sampler).__name__}. It must be an elastic.Sampler, "
            "whose batch follows from the step: an iterator over a loader cannot be repeated after a loss"
        )
    agent = current_agent()
    job = Job(sampler, min_size, State(state), find_replica(replica_size))
    job.enter(agent.options.rendezvous_timeout)
    return job
