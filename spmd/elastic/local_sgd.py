"""Training with rare reductions: members train locally for a round, and then average what they have learned.

A round is one step of the job. Its local steps need no other member; its end is the *outer reduction*, which
is committed on all members or on none. If a member is lost, only the outer reduction is repeated, by the
others: their local steps count. The lost member's part of the round's samples is not used in that round.

A member's part of the samples follows from the view in which the member began the round. If the view has
changed between two members' begins, their parts may overlap. So each outer reduction begins with an exchange
of the parts, and leaves out those that overlap with an earlier view's: no sample is used twice.

Sources: LocalSGD, Stich 2019 (arXiv 1805.09767); DiLoCo, Douillard et al. 2023 (arXiv 2311.08105).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Self

import torch
from torch import nn

from rpc.errors import InvalidOptionError
from spmd.elastic.attempt import Attempt
from spmd.elastic.errors import ElasticError, JobMismatchError
from spmd.elastic.job import Job

__all__ = ["DiLoCo", "LocalSGD", "Round"]

_KINDS: Final = ("LocalSGD", "DiLoCo")


class LocalSGD:
    """Averages the members' parameters once a round, each after some local steps.

    Averages are weighted by the numbers of samples that members have trained on. After each round the
    parameters are bitwise equal on all members; local optimizers are each member's own.

    Args:
        job: the job, before its first attempt, with ``model`` in its state. ``job.attempts`` is not used.
        model: the module. Parameters that require gradients now are averaged; others must not change.
        optimizer: takes the local steps. A newcomer begins with a copy of a neighbour's if it is in the
            job's state, otherwise with its own.
        sync_every: number of local steps of a round; the batch of a step of the job is cut into as many.

    Raises:
        ElasticError: the model is not in the job's state, or the job has begun; or the optimizer or another
            module of the state has parameters that require gradients and are not the model's.
        InvalidOptionError: ``sync_every`` is not a positive integer.

    Example::

        job = elastic.join(model=model, sampler=elastic.Sampler(len(x), batch_size=4800))
        local = elastic.LocalSGD(job, model, optimizer, sync_every=20)
        for each in local.rounds(until=100):
            with each:
                for i in each.batches:
                    optimizer.zero_grad()
                    loss_fn(model(x[i]), y[i]).backward()
                    optimizer.step()
        job.leave()
    """

    kind: ClassVar[int] = _KINDS.index("LocalSGD")

    def __init__(self, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int) -> None:
        count: object = sync_every
        if not isinstance(count, int) or count < 1:
            raise InvalidOptionError(
                f"{type(self).__name__}: sync_every is {count!r}; it must be a positive integer"
            )
        self._job, self._count = job, sync_every
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._check()
        job.train_locally(model, optimizer)

    def _check(self) -> None:
        """Raise if the arguments cannot be used."""

    def rounds(self, until: int | None = None) -> Iterator[Round]:
        """Yield rounds until ``until`` of them are committed, a member calls ``finish``, or this one leaves.

        Use each as a context manager, whose block takes the local steps.

        Args:
            until: number of rounds of the whole job; None for no limit.

        Raises:
            Finished, StepFailedError, PutOut, StateLostError, ElasticError: as ``Job.attempts``.
            JobMismatchError: another member has another class or ``sync_every``; raised by the round.
        """
        return self._job.loop(lambda attempt: Round(self, self._job, attempt, until), until)

    # ---- what a round's end does

    def terms(self) -> list[int]:
        """Return what must be the same on all members."""
        return [self.kind, self._count]

    def check_others(self, mine: Sequence[int], others: Sequence[Sequence[int]]) -> None:
        """Raise if another member, given what ``terms`` returns there, by rank, trains in another way."""
        for rank, terms in enumerate(others):
            if terms != mine:
                raise JobMismatchError(
                    f"worker '{self._job.members[rank]}' trains by {_in_words(terms)}, and this worker by "
                    f"{_in_words(mine)}: all members of a job need the same"
                )

    def kept(self) -> list[torch.Tensor]:
        """Return a copy of the parameters."""
        return [each.detach().clone() for each in self._parameters]

    def batches(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Return the samples of each local step."""
        return [each for each in indices.tensor_split(self._count) if len(each)]

    def contribution(self, kept: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what is averaged, given the parameters at the round's begin."""
        return [each.detach() for each in self._parameters]

    def apply(self, kept: list[torch.Tensor], averages: list[torch.Tensor] | None) -> None:
        """Take the outer step, given the averages; None if no member has trained on a sample."""
        for parameter, value in zip(self._parameters, kept if averages is None else averages, strict=True):
            parameter.detach().copy_(value)


class DiLoCo(LocalSGD):
    """Averages once a round how far members' parameters have moved, as the gradient of an outer optimizer.

    Args:
        job: as for ``LocalSGD``, with ``model`` and ``outer_optimizer`` in its state.
        model: as for ``LocalSGD``.
        inner_optimizer: takes the local steps.
        outer_optimizer: takes one step a round, with the parameters of ``model`` that require gradients.
        sync_every: number of local steps of a round.

    Raises:
        ElasticError: as for ``LocalSGD``; or the outer optimizer is not in the job's state, or has other
            parameters.
        InvalidOptionError: ``sync_every`` is not a positive integer.

    Example::

        inner = torch.optim.AdamW(model.parameters())
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        job = elastic.join(model=model, outer=outer, sampler=elastic.Sampler(len(x), batch_size=4800))
        local = elastic.DiLoCo(job, model, inner, outer, sync_every=20)
    """

    kind = _KINDS.index("DiLoCo")

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer,
        sync_every: int,
    ) -> None:
        self._outer = outer_optimizer
        super().__init__(job, model, inner_optimizer, sync_every)

    def _check(self) -> None:
        if not self._job.has(self._outer):
            raise ElasticError(
                "DiLoCo: the outer optimizer is not in the job's state: pass it to elastic.join"
            )
        mine = {each for group in self._outer.param_groups for each in group["params"]}
        if mine != set(self._parameters):
            raise ElasticError(
                f"DiLoCo: the outer optimizer has {len(mine)} parameters, which are not the "
                f"{len(self._parameters)} of the model that require gradients: others would not be trained"
            )

    def contribution(self, kept: list[torch.Tensor]) -> list[torch.Tensor]:
        return [before - now.detach() for before, now in zip(kept, self._parameters, strict=True)]

    def apply(self, kept: list[torch.Tensor], averages: list[torch.Tensor] | None) -> None:
        super().apply(kept, None)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None if averages is None else averages[index].to(parameter.dtype)
        if averages is not None:
            self._outer.step()
        for parameter in self._parameters:
            parameter.grad = None


class Round:
    """One round, as a context manager whose block takes the local steps.

    Attributes:
        step: number of the round, from 0.
        view, size, rank: number and size of the view in which the round began, and this member's rank in it.
        indices: this member's samples; empty in the first round of a newcomer, which only observes it.
        batches: the samples of each local step: ``sync_every`` parts of ``indices``, fewer if there are fewer
            samples.
        committed: whether the outer reduction is committed; after the block.
    """

    def __init__(self, local: LocalSGD, job: Job, attempt: Attempt, until: int | None) -> None:
        self._local, self._job, self._attempt, self._until = local, job, attempt, until
        self.step, self.view, self.size, self.rank = attempt.step, attempt.view, attempt.size, attempt.rank
        self.indices, self.committed = attempt.indices, False
        self.batches = local.batches(self.indices)
        self._part = [attempt.view, *attempt.part]
        self._weight = attempt.weight
        self._kept = local.kept()
        self.is_used = False

    def __repr__(self) -> str:
        return f"<round {self.step}, begun in view {self.view}, rank {self.rank} of {self.size}>"

    def __enter__(self) -> Self:
        self.is_used = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._reduce()
        elif isinstance(error, Exception):
            self._attempt.report(error)

    @torch.no_grad()
    def _reduce(self) -> None:
        terms = self._local.terms()
        sums = _Sums(self._local.contribution(self._kept), self._weight)
        attempt: Attempt | None = self._attempt
        while attempt is not None and not self.committed:
            with attempt:
                rows = attempt.gather([*self._part, *terms], "the exchange of parts in")
                self._local.check_others(terms, [each[3:] for each in rows])
                counted = _counted([each[:3] for each in rows])
                if counted:
                    attempt.root = counted[0]
                sums.begin(attempt, counts=attempt.rank in counted)
                attempt.commit()
                self._local.apply(self._kept, sums.averages())
            self.committed = attempt.committed
            if not self.committed:
                attempt = self._job.again(self._until)


def _counted(parts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks of the members whose parts are averaged: those with samples, except parts that overlap
    with one of an earlier view.

    Args:
        parts: by rank, the number of the view in which the member began the round, and where in the batch its
            part begins and ends.
    """
    taken: list[int] = []
    for rank in sorted(range(len(parts)), key=lambda each: tuple(parts[each])):
        _, begin, end = parts[rank]
        if begin < end and all(end <= parts[each][1] or parts[each][2] <= begin for each in taken):
            taken.append(rank)
    return sorted(taken)


def _in_words(terms: Sequence[int]) -> str:
    kind, count = terms
    return f"{_KINDS[kind]} with sync_every={count}"


class _Sums:
    """Weighted sums of tensors over members, for each attempt anew.

    Args:
        tensors: what this member contributes.
        weight: its weight.
    """

    def __init__(self, tensors: list[torch.Tensor], weight: float) -> None:
        self._shapes = [each.shape for each in tensors]
        self._places: dict[tuple[Any, ...], list[int]] = {}
        for index, each in enumerate(tensors):
            dtype = each.dtype if each.dtype.itemsize >= 4 else torch.float32
            self._places.setdefault((dtype, each.device), []).append(index)
        self._mine = [
            torch.cat([tensors[index].flatten().to(dtype) for index in places]).mul_(weight)
            for (dtype, _), places in self._places.items()
        ]
        if weight == 0.0:
            for each in self._mine:
                each.zero_()  # local parameters may not be numbers
        self._weight = weight
        self._flats: list[torch.Tensor] = []
        self._total = torch.empty(0, device="cpu")

    def begin(self, attempt: Attempt, *, counts: bool) -> None:
        """Sum over the members of the attempt's view; this one adds nothing unless it counts."""
        self._flats = [each.clone() if counts else torch.zeros_like(each) for each in self._mine]
        weight = self._weight if counts else 0.0
        self._total = torch.tensor([weight], dtype=torch.float64, device="cpu")
        for each in (*self._flats, self._total):
            attempt.start(each)
        attempt.finish()

    def averages(self) -> list[torch.Tensor] | None:
        """Return the weighted averages; None if all weights are 0."""
        total = self._total.item()
        if total == 0.0:
            return None
        found: dict[int, torch.Tensor] = {}
        for flat, places in zip(self._flats, self._places.values(), strict=True):
            sizes = [self._shapes[index].numel() for index in places]
            for index, part in zip(places, flat.div_(total).split_with_sizes(sizes), strict=True):
                found[index] = part.view(self._shapes[index])
        return [found[index] for index in range(len(self._shapes))]
