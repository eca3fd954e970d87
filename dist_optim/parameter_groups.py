"""The parameters to be optimized: references, or groups of them with options of their own. Pure.

Parameters are numbered in the order in which they were given, over all groups, as in ``torch.optim``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from rpc.agent.futures import Future
from rpc.errors import with_article
from rref import RRef

__all__ = ["GivenParameters", "HostedParameter", "Parameters", "read"]


class HostedParameter(ABC):
    """A reference to a parameter that several workers have, and whose host makes the optimizers."""

    @abstractmethod
    def owner_name(self) -> str:
        """Return the name of the host; those with the same name get one optimizer."""

    @abstractmethod
    def make_optimizer(
        self, optimizer_class: Callable[..., Any], references: Sequence[Any], *how: Any
    ) -> Future[tuple[Any, list[list[int]]]]:
        """Make an optimizer of these parameters; see ``make_local_optimizer``. In place of an ``RRef``, the
        future's value has an object with the methods ``rpc_sync`` and ``rpc_async``.
        """


Reference = RRef[Any] | HostedParameter
_REFERENCES: Final = (RRef, HostedParameter)

Parameters = Iterable[RRef[Any]] | Iterable[HostedParameter] | Iterable[Mapping[str, Any]]
"""References to parameters; or groups of them, each a dict with its ``params`` and its options."""


class GivenParameters(NamedTuple):
    """Parameters, numbered.

    Attributes:
        references: references to all of them.
        options: options of each group; None if the user gave no groups, so that all are one.
        group_of: for each reference the number of its group.
    """

    references: Sequence[Reference]
    options: Sequence[Mapping[str, Any]] | None
    group_of: Sequence[int]

    def by_owner(self) -> dict[str, list[list[int]]]:
        """For each owner's name the positions of its parameters in each group; a group may have none."""
        groups = 1 if self.options is None else len(self.options)
        placed: dict[str, list[list[int]]] = {}
        for position, (reference, group) in enumerate(zip(self.references, self.group_of, strict=True)):
            owner = reference.owner_name()
            placed.setdefault(owner, [[] for _ in range(groups)])[group].append(position)
        return placed


def read(given: Parameters) -> GivenParameters:
    """Read the parameters that ``DistributedOptimizer`` was given.

    Raises:
        TypeError: an entry is not a reference, or, where others are groups, not a group.
        ValueError: there are no parameters, or none in some group.
    """
    if isinstance(given, _REFERENCES):
        raise TypeError(f"params_rref is one reference, {given!r}, not a list of them: pass [params_rref]")
    if isinstance(given, Mapping):
        raise TypeError("params_rref is one parameter group, not a list of them: pass [params_rref]")
    found: list[Any] = list(given)
    if not found:
        raise ValueError("DistributedOptimizer got an empty list of parameters")
    if not any(isinstance(each, Mapping) for each in found):
        _check_references(found, "params_rref")
        return GivenParameters(found, None, [0] * len(found))
    references: list[Reference] = []
    group_of: list[int] = []
    for number, group in enumerate(found):
        members = _members(group, f"params_rref[{number}]")
        references += members
        group_of += [number] * len(members)
    options = [{name: value for name, value in group.items() if name != "params"} for group in found]
    return GivenParameters(references, options, group_of)


def _members(group: Any, where: str) -> list[Reference]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"{where} is {with_article(type(group))}, not a parameter group: if one entry is a group, all "
            "must be, as dicts with references under 'params', and options"
        )
    given = group["params"]
    members = [given] if isinstance(given, _REFERENCES) else list(given)
    if not members:
        raise ValueError(f"{where} is a parameter group without parameters")
    _check_references(members, f"{where}['params']")
    return members


def _check_references(given: Sequence[Any], where: str) -> None:
    for position, reference in enumerate(given):
        if not isinstance(reference, _REFERENCES):
            raise TypeError(
                f"{where}[{position}] is {with_article(type(reference))}, not a reference: for "
                "parameters of this worker pass a list of rpc.RRef(each) for each in model.parameters()"
            )
