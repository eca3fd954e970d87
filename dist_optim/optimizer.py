"""``DistributedOptimizer``: one optimizer for parameters on many workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

import dist_autograd
from dist_autograd.api import autograd, check_arguments
from dist_autograd.root import Steps
from dist_optim import checkpoint, parameter_groups
from dist_optim.fan_out import add_steps, on_all, on_all_objects
from dist_optim.local_optimizer import LocalOptimizer, OptimizerFactory, make_local_optimizer
from dist_optim.lr_scheduler import DistributedLRScheduler, LocalScheduler, SchedulerFactory
from dist_optim.parameter_groups import HostedParameter, Parameters
from rpc.agent.futures import Future
from rpc.api import rpc_async
from rpc.runtime.interrupts import is_interruption
from rref import RRef
from rref.reference import address_of

__all__ = ["DistributedOptimizer", "check_context"]


class DistributedOptimizer:
    """An optimizer for parameters that live on many workers; each owner has a local one for its own.

    It uses the gradients that ``dist_autograd.backward`` has accumulated in a context, and does not use
    ``.grad``.

    Several trainers may step at once, with this object (which can be sent) or each with its own: on each
    owner, one step at a time runs on the same parameters, no step is lost, and there is no common order of
    steps on different owners. A step of one trainer may come between the forward and the backward pass of
    another, as is usual in asynchronous training (Hogwild: Recht et al., NIPS 2011). That backward pass
    continues with the current parameters. Its gradients are approximate where it needs parameters, as for a
    ``Linear`` that is not the first layer, and exact if there is no step in between, as with one trainer.
    With ``stale_gradients=False``, PyTorch's engine refuses such a backward pass: "modified by an inplace
    operation".

    A parameter that is given several times, because modules share it, is optimized once.

    Attributes:
        local_optimizers: references to the local optimizers, by the owner's name.

    Args:
        optimizer_class: any class of ``torch.optim`` except ``LBFGS``, or a similar class, or a function that
            returns an optimizer. It runs on each owner, and must be picklable.
        params_rref: references to parameters, such as ``RemoteModule.remote_parameters()``; for those of this
            worker, ``rpc.RRef(parameter)``. Or parameter groups, as in ``torch.optim``: dicts with such
            references under ``params``, and the group's own options.
        args: arguments of ``optimizer_class`` after the parameters.
        stale_gradients: whether backward passes may continue with parameters that another trainer's step has
            changed since their forward pass; if not, such a backward pass raises. Default: true.
        kwargs: keyword arguments of ``optimizer_class``.

    Raises:
        TypeError: one of ``params_rref`` is not a reference, or refers to something other than a tensor; or
            each step of ``optimizer_class`` needs a closure that recomputes the loss, as that of ``LBFGS``
            does.
        ValueError: there are no parameters, or none in some group, or one is in several groups, or one is
            the result of an operation, of which no gradients are kept.
        WorkerLostError: an owner is gone.
        Exception: the error that ``optimizer_class`` raised on an owner, which the exception's notes name.

    Example::

        optimizer = DistributedOptimizer(optim.SGD, model.remote_parameters(), lr=0.1, momentum=0.9)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_fn(model(x), y)])
            optimizer.clip_grad_norm_(context_id, max_norm=1.0)
            optimizer.step(context_id)

        DistributedOptimizer(
            optim.SGD,
            [{"params": body.remote_parameters()}, {"params": head.remote_parameters(), "lr": 1.0}],
            lr=0.1,
        )
    """

    def __init__(
        self,
        optimizer_class: OptimizerFactory,
        params_rref: Parameters,
        *args: Any,
        stale_gradients: bool = True,
        **kwargs: Any,
    ) -> None:
        given = parameter_groups.read(params_rref)
        placed = given.by_owner()
        if getattr(optimizer_class, "__module__", "").startswith("torch.optim"):
            optimizer_class([torch.empty(1, 1)], *args, **kwargs)  # checks the arguments here
        how = (given.options, args, kwargs, stale_gradients)

        def make(groups: list[list[int]]) -> Future[tuple[RRef[LocalOptimizer], list[list[int]]]]:
            references = [given.references[position] for positions in groups for position in positions]
            first = references[0]
            if isinstance(first, HostedParameter):
                return first.make_optimizer(optimizer_class, references, groups, *how)
            return rpc_async(
                first.owner(),
                make_local_optimizer,
                args=(optimizer_class, references, groups, *how),
            )

        made = on_all(placed, f"making a {getattr(optimizer_class, '__name__', optimizer_class)}", make)
        self.local_optimizers: dict[str, RRef[LocalOptimizer]] = {}
        self._positions: dict[str, list[list[int]]] = {}
        """For each owner, the positions of its optimizer's parameters, group by group."""
        for owner, (optimizer, groups) in zip(placed, made, strict=True):
            self.local_optimizers[owner], self._positions[owner] = optimizer, groups

    def step(self, context_id: int) -> None:
        """Perform one step on each owner, with the gradients that the context has there, and wait for all.

        Parameters without a gradient in this context are not changed.

        Args:
            context_id: the id that ``dist_autograd.context`` returned.

        Raises:
            AutogradError: there is no such context.
            WorkerLostError: an owner is gone.
            Exception: the error of an optimizer, with that worker's traceback. Its notes name the workers on
                which the step failed, and those on which it was performed.
        """
        check_context(context_id)
        self._step(self.local_optimizers, context_id)

    def backward_and_step(
        self, context_id: int, roots: Sequence[Tensor], *, retain_graph: bool = False
    ) -> None:
        """Compute gradients as ``dist_autograd.backward`` does, and perform a step on each owner.

        An owner performs its step as soon as its own part of the backward pass is done: without a further
        round trip, and while other workers still compute their gradients. So gradients cannot be clipped in
        between, and if the backward pass fails on some worker, others may have performed their step. Unlike
        ``step``, which has the timeout of calls, such a step has none, as the backward pass has none.

        Owners that do not take part, and those of shards of a ``ShardedModule``, step after the backward
        pass. If a nested backward pass in this context, as in a hook, brings gradients to an owner that has
        performed its step, that step lacks them: call ``backward`` and ``step`` in this case.

        Args:
            context_id: the id that ``dist_autograd.context`` returned.
            roots: as for ``dist_autograd.backward``.
            retain_graph: as for ``dist_autograd.backward``.

        Raises:
            AutogradError: there is no such context, or a root cannot be used.
            BackwardError: a node of the graph, or an optimizer at the end of its worker's part, raised an
                error; names the worker, and has the error as its cause.
            WorkerLostError: a worker that takes part is gone.
            Exception: the error of another optimizer, as from ``step``.

            The notes of the exception name the workers on which the step was performed, and those on which it
            may have been performed.

        Example::

            with dist_autograd.context() as context_id:
                optimizer.backward_and_step(context_id, [loss_fn(model(x), y)])
        """
        check_arguments("backward_and_step", context_id, roots)
        check_context(context_id)
        autograd().models.locks.check_none_held("backward_and_step")
        optimizers: Mapping[str, Any] = self.local_optimizers
        addresses = {
            worker: address_of(local)
            for worker, local in optimizers.items()
            if isinstance(local, RRef) and not local.is_owner()
        }
        steps = Steps(dict(addresses.values()))
        try:
            autograd().backwards.run(context_id, roots, retain_graph, steps)
            left = {
                worker: local
                for worker, local in optimizers.items()
                if worker not in addresses or addresses[worker][0] not in steps.done
            }
            if left:
                self._step(left, context_id)
        except Exception as error:
            if not is_interruption(error):
                add_steps(error, steps)
            raise

    def _step(self, optimizers: Mapping[str, RRef[LocalOptimizer]], context_id: int) -> None:
        # Parameters of this worker: order the step after their current uses.
        border = autograd().contexts.requests.border
        if border.encloses:
            border.updated()
        on_all_objects(optimizers, "step", lambda local: local.step(context_id))

    def clip_grad_norm_(
        self, context_id: int, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the context's gradients so that their norm is at most ``max_norm``.

        Like ``torch.nn.utils.clip_grad_norm_``, with the norm of the gradients of all parameters on all
        owners, taken together as one vector.

        Args:
            context_id: the id that ``dist_autograd.context`` returned.
            max_norm: maximum norm after clipping.
            norm_type: order of the norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: whether to raise if the norm is infinite or NaN, and change nothing.

        Returns:
            The norm before clipping, of shape (), on the CPU; 0 if there are no gradients.

        Raises:
            AutogradError: there is no such context.
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        """
        check_context(context_id)
        norm_type = float(norm_type)
        norms = on_all_objects(
            self.local_optimizers, "clip_grad_norm_", lambda local: local.norms(context_id, norm_type)
        )
        found = torch.cat(norms)
        total: Tensor = (
            torch.linalg.vector_norm(found, norm_type) if len(found) else torch.tensor(0.0, device="cpu")
        )
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
                "clipped; to scale them anyway, set error_if_nonfinite=False"
            )
        factor = float(max_norm / (total + 1e-6))
        if not factor >= 1:  # also true for NaN
            on_all_objects(
                self.local_optimizers, "clip_grad_norm_", lambda local: local.scale(context_id, factor)
            )
        return total

    def lr_scheduler(
        self, scheduler_class: SchedulerFactory, *args: Any, **kwargs: Any
    ) -> DistributedLRScheduler:
        """Make a learning-rate scheduler on all owners, which step together.

        Args:
            scheduler_class: any class of ``torch.optim.lr_scheduler``, or a function that takes an optimizer
                and returns a scheduler, as for ``SequentialLR``.
            args: arguments of ``scheduler_class`` after the optimizer.
            kwargs: keyword arguments of ``scheduler_class``.

        Example::

            scheduler = optimizer.lr_scheduler(torch.optim.lr_scheduler.StepLR, step_size=10, gamma=0.5)
            for epoch in range(30):
                train_one_epoch()
                scheduler.step()
        """
        for worker, optimizer in self.local_optimizers.items():
            if not isinstance(optimizer, RRef):
                raise TypeError(
                    f"{worker} has no schedulers for its optimizers: step one in a method of the object"
                )
        made = on_all(
            self.local_optimizers,
            f"making a {getattr(scheduler_class, '__name__', scheduler_class)}",
            lambda optimizer: rpc_async(
                optimizer.owner(), _make_local_scheduler, args=(optimizer, scheduler_class, args, kwargs)
            ),
        )
        return DistributedLRScheduler(dict(zip(self.local_optimizers, made, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all local optimizers, such as momentum.

        It has the form of ``torch.optim.Optimizer.state_dict``, with each owner's part of a parameter group
        as a group, and the parameters numbered as they were given, over all groups. It can be saved with
        ``torch.save``. It does not contain the parameters themselves. Each owner's part is taken between two
        steps there.

        Example::

            torch.save({"optimizer": optimizer.state_dict(), "model": ...}, path)
        """
        states = on_all_objects(self.local_optimizers, "state_dict", lambda local: local.state_dict())
        return checkpoint.merge(list(zip(self._positions.values(), states, strict=True)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, in this group or a new one, wherever the parameters live now.

        Args:
            state_dict: the result of ``state_dict`` for the same parameters in the same order; or the state
                of a ``torch.optim`` optimizer of the same class with the same groups.

        Raises:
            ValueError: the state is about other parameters or groups, or is not a state. Nothing is changed
                then.
        """
        states = checkpoint.split(state_dict, list(self._positions.values()))
        parts = {
            owner: (optimizer, state)
            for (owner, optimizer), state in zip(self.local_optimizers.items(), states, strict=True)
        }
        on_all(parts, "load_state_dict", lambda part: part[0].rpc_async().load_state_dict(part[1]))

    if not TYPE_CHECKING:  # so that type checkers find misspelled names

        def __getattr__(self, name: str) -> NoReturn:
            hint = ""
            if name == "zero_grad":
                hint = ": there is nothing to reset, as gradients belong to the context. Leave the call out"
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
            )

    def __repr__(self) -> str:
        counts = {owner: sum(map(len, groups)) for owner, groups in self._positions.items()}
        owners = ", ".join(f"{count} on '{owner}'" for owner, count in counts.items())
        return f"DistributedOptimizer({owners})"


def check_context(context_id: int) -> None:
    """Raise ``AutogradError`` unless this worker knows the context."""
    if not dist_autograd.has_context(context_id):
        dist_autograd.get_gradients(context_id)


def _make_local_scheduler(*args: Any) -> RRef[LocalScheduler]:
    return RRef(LocalScheduler(*args))
