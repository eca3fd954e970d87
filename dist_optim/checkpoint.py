"""Merging the state of all local optimizers into one dict, and splitting it. Pure.

The dict has the form of ``torch.optim.Optimizer.state_dict``. Parameters are numbered by their position among
the references that the distributed optimizer was given, over all parameter groups, so that the dict does not
depend on where they live; and each owner's part of a group is a separate group, since an optimizer may keep
state of its own in its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

__all__ = ["Placed", "merge", "split"]

State = dict[str, Any]
Placed = Sequence[Sequence[int]]
"""Positions of an owner's parameters: for each parameter group those that the owner has, if any."""


def merge(parts: Sequence[tuple[Placed, State]]) -> State:
    """Merge the states of all owners.

    Args:
        parts: for each owner its parameters, and the state of its optimizer.
    """
    state: dict[int, Any] = {}
    groups: list[State] = []
    for placed, local in parts:
        positions = list(chain.from_iterable(placed))
        state |= {positions[index]: kept for index, kept in local["state"].items()}
        groups += [
            group | {"params": [positions[index] for index in group["params"]]}
            for group in local["param_groups"]
            if group["params"]
        ]
    return {"state": state, "param_groups": groups}


def split(state: State, parts: Sequence[Placed]) -> list[State]:
    """Split a state into those of all owners; it may come from another placement of the same parameters.

    Args:
        state: the result of ``merge``, or the state of a single optimizer of all the parameters.
        parts: for each owner its parameters.

    Raises:
        ValueError: the state is about other parameters, or has parameters in one group that are now in
            several; or parameters of a group that one worker owns now had different options, such as learning
            rates.
    """
    group_of: dict[int, State] = {}
    for group in _entry(state, "param_groups"):
        group_of |= dict.fromkeys(_entry(group, "params"), group)
    groups = [list(chain.from_iterable(of_owners)) for of_owners in zip(*parts, strict=True)]
    expected = set(chain.from_iterable(groups))
    if group_of.keys() != expected:
        raise ValueError(
            f"the state is about {len(group_of)} parameters ({_listed(group_of)}), this optimizer has "
            f"{len(expected)} ({_listed(expected)}): load it into one that was given the same parameters in "
            "the same order"
        )
    for number, group in enumerate(_entry(state, "param_groups")):
        saved = set(_entry(group, "params"))
        together = [index for index, positions in enumerate(groups) if not saved.isdisjoint(positions)]
        if len(together) > 1:
            raise ValueError(
                f"the state's parameter group {number} is about parameters that are in several groups here "
                f"({_listed(together)}): load it into an optimizer with the same groups"
            )
    kept = _entry(state, "state")
    return [_part(placed, groups, group_of, kept) for placed in parts]


def _part(placed: Placed, groups: Placed, group_of: Mapping[int, State], kept: Mapping[int, Any]) -> State:
    """Return an owner's state.

    Args:
        placed: its parameters.
        groups: the parameters of all owners together.
        group_of: the saved group of each parameter, by position.
        kept: the saved state of each parameter that has one, by position.
    """
    local: list[State] = []
    count = 0
    for positions, everywhere in zip(placed, groups, strict=True):
        # A group without parameters here still has its options, for the schedulers.
        options = _common_options([group_of[position] for position in positions or everywhere[:1]])
        local.append(options | {"params": list(range(count, count + len(positions)))})
        count += len(positions)
    here = enumerate(chain.from_iterable(placed))
    return {
        "state": {index: kept[position] for index, position in here if position in kept},
        "param_groups": local,
    }


def _entry(state: Any, key: str) -> Any:
    if not isinstance(state, Mapping) or key not in state:
        raise ValueError(f"this is no optimizer's state, since it has no '{key}': pass what state_dict gave")
    return state[key]


def _listed(positions: Any) -> str:
    shown = sorted(positions)
    return ", ".join(map(str, shown[:8])) + (", ..." if len(shown) > 8 else "")


def _common_options(groups: Sequence[State]) -> State:
    """Return the options of some groups, which must agree."""
    first = groups[0]
    for group in groups:
        for name in (group.keys() | first.keys()) - {"params"}:
            if group is not first and not _equal(group.get(name), first.get(name)):
                raise ValueError(
                    f"parameters of a group that one worker owns now had different values of '{name}': "
                    f"{first.get(name)} and {group.get(name)}. Place them as they were"
                )
    return {name: value for name, value in first.items() if name != "params"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
