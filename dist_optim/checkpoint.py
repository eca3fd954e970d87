"""The state of a distributed optimizer as one dict, and that dict in parts. Pure.

The dict has the form of ``torch.optim.Optimizer.state_dict``. Parameters are named by their positions among
the references that the distributed optimizer was given, so that it means the same wherever they live; and
each owner's parameters make up one group, since an optimizer may keep figures of its own in its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["merge", "split"]

State = dict[str, Any]


def merge(parts: Sequence[tuple[Sequence[int], State]]) -> State:
    """One state out of those of all owners.

    Args:
        parts: for each owner, the positions of its parameters, and its optimizer's state.
    """
    state: dict[int, Any] = {}
    groups: list[State] = []
    for positions, local in parts:
        state |= {positions[index]: kept for index, kept in local["state"].items()}
        groups += [
            group | {"params": [positions[index] for index in group["params"]]}
            for group in local["param_groups"]
        ]
    return {"state": state, "param_groups": groups}


def split(state: State, parts: Sequence[Sequence[int]]) -> list[State]:
    """The states of all owners out of one, which may come from another placement of the same parameters.

    Args:
        state: what ``merge`` gave, or the state of a single optimizer of all the parameters.
        parts: for each owner, the positions of its parameters.

    Raises:
        ValueError: the state is about other parameters; or parameters that one worker owns now had
            different options, such as learning rates.
    """
    group_of: dict[int, State] = {}
    for group in _entry(state, "param_groups"):
        group_of |= dict.fromkeys(_entry(group, "params"), group)
    expected = {position for positions in parts for position in positions}
    if group_of.keys() != expected:
        raise ValueError(
            f"the state is about {len(group_of)} parameters ({_listed(group_of)}), this optimizer has "
            f"{len(expected)} ({_listed(expected)}): load it into one that was given the same parameters in "
            "the same order"
        )
    kept = _entry(state, "state")
    return [
        {
            "state": {index: kept[position] for index, position in enumerate(positions) if position in kept},
            "param_groups": [
                _common_options([group_of[position] for position in positions])
                | {"params": list(range(len(positions)))}
            ],
        }
        for positions in parts
    ]


def _entry(state: Any, key: str) -> Any:
    if not isinstance(state, Mapping) or key not in state:
        raise ValueError(f"this is no optimizer's state, since it has no '{key}': pass what state_dict gave")
    return state[key]


def _listed(positions: Any) -> str:
    shown = sorted(positions)
    return ", ".join(map(str, shown[:8])) + (", ..." if len(shown) > 8 else "")


def _common_options(groups: Sequence[State]) -> State:
    """The options of some groups, which must agree."""
    first = groups[0]
    for group in groups:
        for name in (group.keys() | first.keys()) - {"params"}:
            if group is not first and not _equal(group.get(name), first.get(name)):
                raise ValueError(
                    f"parameters that one worker owns now had different values of '{name}': "
                    f"{first.get(name)} and {group.get(name)}. Place them as they were"
                )
    return {name: value for name, value in first.items() if name != "params"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
