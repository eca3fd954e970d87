"""Sums gradients over the members of a view while the backward pass runs.

PyTorch's own reducer, that of ``torch.nn.parallel.DistributedDataParallel``, cannot be used after an
exception in a backward pass, and changes its buckets after the first step, so those of a newcomer would
differ. Here the buckets depend on the parameters alone. They are reduced in their order, each as soon as its
gradients are there. A parameter that has no gradient on any member has none after the sum, as it would have
in one process: optimizers leave it alone. For that, each bucket ends with one number for each parameter,
which is positive if a member has a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import nn

from spmd.elastic.errors import ElasticError
from spmd.elastic.sharded import local_part, sharded_like
from spmd.torch_internals import backward_engine

__all__ = ["DistributedDataParallel", "Reducer", "Reduction"]

_BUCKET_BYTES: Final = 8 << 20


class Reduction(Protocol):
    """The attempt that gradients belong to."""

    @property
    def weight(self) -> float: ...

    @property
    def has_failed(self) -> bool:
        """Whether a sum has failed."""

    def start(self, tensor: torch.Tensor, *, blocks: bool = False) -> None:
        """Begin to sum a tensor over the members, in place; with ``blocks``, do it on this thread."""

    def finish(self) -> None:
        """Wait until all sums are there, or the attempt has failed."""


class _Bucket:
    """Consecutive parameters, whose gradients are parts of one tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        size = sum(local_part(each).numel() for each in parameters)
        self.flat = torch.zeros(size + len(parameters), dtype=first.dtype, device=first.device)
        self.counts = self.flat[size:]
        self.views: list[torch.Tensor] = []
        place = 0
        for each in parameters:
            local = local_part(each)
            part = self.flat[place : place + local.numel()].view(local.shape)
            self.views.append(sharded_like(each, part.data))  # whose writes are counted apart from others
            place += local.numel()
        self.written: list[int] = []
        """How often each was written into when the attempt began."""
        self.ready: set[int] = set()
        self.used: set[int] = set()
        """Places of the parameters that have a gradient on this member."""
        self.started = self.finished = False

    def begin(self) -> None:
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self.written = [_writes_to(each) for each in self.views]
        self.ready, self.used = set(), set()
        self.started = self.finished = False

    def gather(self) -> None:
        """Bring the gradients into ``flat``, wherever autograd or the program has put them."""
        self.used |= self._written_by_the_program()
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                self.used.discard(place)
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
                self.used.add(place)
            parameter.grad = view
        if len(self.used) == len(self.parameters):
            self.counts.fill_(1)
        else:
            counts = [float(place in self.used) for place in range(len(self.parameters))]
            self.counts.copy_(torch.tensor(counts, device="cpu"))

    def _written_by_the_program(self) -> set[int]:
        """Return the places of further gradients: those that are not zero. Of a sharded one, parts may be; it
        counts if there was a write, which is alike for all workers of a replica.
        """
        found: set[int] = set()
        nonzero: dict[int, torch.Tensor] = {}
        for place, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is not view or place in self.used:
                continue
            if (local := local_part(view)) is view:
                nonzero[place] = local.any()
            elif _writes_to(view) != self.written[place]:
                found.add(place)
        if nonzero:
            is_there = torch.stack([*nonzero.values()]).tolist()  # one copy from the device
            found.update(place for place, there in zip(nonzero, is_there, strict=True) if there)
        return found

    def finish(self) -> None:
        """Take the gradients away that no member has, once after the sum."""
        if not self.finished and len(self.used) < len(self.parameters):
            for parameter, count in zip(self.parameters, self.counts.tolist(), strict=True):
                if not count:
                    parameter.grad = None
        self.finished = True


class Reducer:
    """Sums the gradients of one module, once it is attached. For the training thread.

    Args:
        module: the module.

    Attributes:
        attempt: the attempt that gradients belong to, or None.
        accumulates: whether gradients are accumulated on this member only, for the moment.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._is_mean = isinstance(module, DistributedDataParallel)
        self.attempt: Reduction | None = None
        self.accumulates = False
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, tuple[_Bucket, int]] = {}
        self._ends_with_backward = False
        self._handles: list[Any] = []
        run: list[nn.Parameter] = []
        for parameter in reversed([each for each in module.parameters() if each.requires_grad]):
            kind = parameter.dtype, parameter.device
            if run and (kind != (run[0].dtype, run[0].device) or _bytes_of(run) >= _BUCKET_BYTES):
                self._add(run)
                run = []
            run.append(parameter)
        if run:
            self._add(run)

    def _add(self, parameters: list[nn.Parameter]) -> None:
        bucket = _Bucket(parameters)
        self._buckets.append(bucket)
        for place, parameter in enumerate(parameters):
            self._bucket_of[parameter] = bucket, place

    def attach(self) -> None:
        """Begin to follow the module's backward passes. Idempotent."""
        self.detach()
        for parameter in self._bucket_of:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(self._ready))
        if isinstance(self._module, DistributedDataParallel):
            self._module.reducer = self

    def detach(self) -> None:
        """Leave the module alone, whose gradients are not summed any more. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if isinstance(self._module, DistributedDataParallel) and self._module.reducer is self:
            self._module.reducer = None

    def sums(self, parameter: torch.Tensor) -> bool:
        """Whether this sums the gradient of a parameter: it required gradients when the job was joined."""
        return parameter in self._bucket_of

    def begin(self, attempt: Reduction) -> None:
        """Begin an attempt: gradients are zero."""
        self.attempt, self.accumulates, self._ends_with_backward = attempt, False, False
        for bucket in self._buckets:
            bucket.begin()

    def end(self) -> None:
        """Leave gradients alone until the next attempt."""
        self.attempt = None

    def _ready(self, parameter: nn.Parameter) -> None:
        if self.attempt is None:
            return
        bucket, place = self._bucket_of[parameter]
        bucket.used.add(place)
        if self.accumulates:
            return
        if place in bucket.ready:
            raise ElasticError(
                "a second backward pass has reached a parameter whose gradient was reduced in this attempt: "
                "run all backward passes but the last one under `with attempt.accumulate():`"
            )
        bucket.ready.add(place)
        if not self._ends_with_backward:
            self._ends_with_backward = True
            backward_engine.queue_callback(self.finish)
        self._start_ready()

    def _start_ready(self) -> None:
        """Start the buckets that are ready, except the last one, which nothing is left to be done beside."""
        for bucket in self._buckets[:-1]:
            if len(bucket.ready) < len(bucket.parameters):
                return
            if not bucket.started:
                self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        assert self.attempt is not None
        bucket.started = True
        bucket.ready = set(range(len(bucket.parameters)))
        bucket.gather()
        weight = self.attempt.weight
        if weight == 0.0:
            bucket.flat.zero_()  # gradients of an empty mean are not numbers
            bucket.used.clear()
        elif self._is_mean:
            bucket.flat.mul_(weight)
        self.attempt.start(bucket.flat, blocks=bucket is self._buckets[-1])

    def finish(self) -> None:
        """Reduce what is not reduced yet, and wait for all sums."""
        if self.attempt is not None:
            for bucket in self._buckets:
                if not bucket.started:
                    self._start(bucket)
            self.attempt.finish()
            if not self.attempt.has_failed:
                for bucket in self._buckets:
                    bucket.finish()


class DistributedDataParallel(nn.Module):
    """Wraps a module whose gradients are averaged over the batch, as PyTorch's class of this name does.

    Without it, gradients of a module that is part of the job's state are summed. With it, a loss that is a
    mean over this member's samples gives the gradient of the mean over the batch: members' gradients are
    weighted by their shares of the batch, which may differ.

    Args:
        module: the module; as part of a job's state, pass the wrapper to ``elastic.join``.

    Example::

        model = elastic.DistributedDataParallel(net)
        job = elastic.join(model=model, optimizer=optimizer, sampler=sampler)
        for attempt in job.attempts(until=1000):
            with attempt:
                loss_fn(model(x[attempt.indices]), y[attempt.indices]).backward()
                optimizer.step()
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.reducer: Reducer | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the next backward pass outside reduces the sums."""
        with accumulating([] if self.reducer is None else [self.reducer]):
            yield


@contextlib.contextmanager
def accumulating(reducers: list[Reducer]) -> Iterator[None]:
    """Accumulate gradients without reducing them."""
    before = [each.accumulates for each in reducers]
    for each in reducers:
        each.accumulates = True
    try:
        yield
    finally:
        for each, value in zip(reducers, before, strict=True):
            each.accumulates = value


def _writes_to(tensor: torch.Tensor) -> int:
    """Return how often a tensor that may be sharded was written into, as a whole or by its part."""
    return tensor._version + local_part(tensor)._version


def _bytes_of(parameters: list[nn.Parameter]) -> int:
    return sum(local_part(each).numel() * each.element_size() for each in parameters)
