"""The state of a job: what is put back when an attempt is repeated, and what newcomers load.

Parameters and the states of optimizers change only when a step is committed. What the rest of a block changes
is copied when an attempt begins: buffers of modules, the options of optimizers, such as learning rates, the
states of random number generators, and everything of objects that are neither modules nor optimizers, such as
schedulers and counters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from spmd.elastic.random_states import RandomStates
from spmd.elastic.sharded import fully_sharded_parts, is_fully_sharded, local_part, parts_of, with_parts
from spmd.torch_internals import forget_backward, forget_unscaled

__all__ = ["UNKNOWN_STEPS", "State"]

UNKNOWN_STEPS: Final = -1

_SCALER_ATTRIBUTES: Final = ("grad_scale", "found_inf")
"""What ``GradScaler.step`` gives to a fused optimizer, and takes away after the optimizer's step."""


class State:
    """The objects that make up the state of a job. For the training thread, except ``give``.

    Args:
        objects: objects with ``state_dict`` and ``load_state_dict``, by name.

    Attributes:
        steps: how often optimizers have stepped in the last committed step; ``UNKNOWN_STEPS`` in a newcomer.
        keeps_all: whether everything is copied when an attempt begins, since members train locally then.

    Raises:
        TypeError: an object does not have them.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            if not (
                callable(getattr(value, "state_dict", None))
                and callable(getattr(value, "load_state_dict", None))
            ):
                raise TypeError(
                    f"elastic.join: {name} is of type {type(value).__name__}, which has no state_dict and "
                    "load_state_dict; the state of a job consists of objects that have both"
                )
        self._objects = dict(objects)
        self.modules = [each for each in objects.values() if isinstance(each, nn.Module)]
        self.optimizers = [each for each in objects.values() if isinstance(each, torch.optim.Optimizer)]
        self._others = {
            name: each
            for name, each in objects.items()
            if not isinstance(each, nn.Module | torch.optim.Optimizer)
        }
        self.steps = UNKNOWN_STEPS
        self.keeps_all = False
        self._all: dict[str, Any] = {}
        self._fully_sharded = {
            name: each
            for name, each in objects.items()
            if isinstance(each, nn.Module) and is_fully_sharded(each)
        }
        self._sharded: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}
        self._options: dict[str, list[dict[str, Any]]] = {}
        self._scales: list[dict[str, Any]] = []
        self._other_states: dict[str, Any] = {}
        self._random = RandomStates()

    def describe(self) -> str:
        """Describe the objects: equal texts on members whose states fit each other."""
        lines = []
        for name, value in self._objects.items():
            lines.append(f"{name}: {type(value).__name__}")
            if isinstance(value, nn.Module):
                tensors = (*value.named_parameters(), *value.named_buffers())
                lines += [f"{name}.{key}: {tuple(each.shape)}, {each.dtype}" for key, each in tensors]
            elif isinstance(value, torch.optim.Optimizer):
                sizes = [len(group["params"]) for group in value.param_groups]
                lines.append(f"{name}: groups of {sizes} parameters")
        return "\n".join(lines)

    def clear_gradients(self) -> None:
        """Clear the gradients of modules that reduce them by themselves: FSDP2's, which would be added to.
        An earlier attempt may have ended within a backward pass, or between two of them.
        """
        for module in self._fully_sharded.values():
            for each in fully_sharded_parts(module):
                forget_backward(each)
            module.zero_grad()

    def keep(self) -> None:
        """Copy what an attempt may change."""
        if self.keeps_all:
            self._all = {name: copy.deepcopy(each.state_dict()) for name, each in self._objects.items()}
            return
        # FSDP2 gathers and frees parameters while a step is computed, which ``give`` must not see.
        self._sharded = {name: each.state_dict() for name, each in self._fully_sharded.items()}
        self._buffers = {
            name: {key: each.detach().clone() for key, each in value.named_buffers()}
            for name, value in self._objects.items()
            if isinstance(value, nn.Module)
        }
        self._options = {
            name: [
                {key: _copied(option) for key, option in group.items() if key != "params"}
                for group in value.param_groups
            ]
            for name, value in self._objects.items()
            if isinstance(value, torch.optim.Optimizer)
        }
        self._scales = [
            {key: vars(each)[key] for key in _SCALER_ATTRIBUTES if key in vars(each)}
            for each in self.optimizers
        ]
        self._other_states = {name: copy.deepcopy(each.state_dict()) for name, each in self._others.items()}
        self._random.keep()

    def put_back(self) -> None:
        """Undo what an attempt has changed."""
        with torch.no_grad():
            for name, kept in self._buffers.items():
                for key, each in self._objects[name].named_buffers():
                    each.copy_(kept[key])
            for name, groups in self._options.items():
                for group, options in zip(self._objects[name].param_groups, groups, strict=False):
                    _set_options(group, options)
        for optimizer, scales in zip(self.optimizers, self._scales, strict=True):
            for key in _SCALER_ATTRIBUTES:
                vars(optimizer).pop(key, None)
            vars(optimizer).update(scales)
        for name, kept in self._other_states.items():
            other = self._others[name]
            other.load_state_dict(copy.deepcopy(kept))
            if isinstance(other, torch.amp.GradScaler):
                forget_unscaled(other)  # the repeated attempt has other gradients
        self._random.put_back()

    def buffers(self) -> list[torch.Tensor]:
        """Return this worker's parts of all modules' buffers, in an order that is the same on all members."""
        return [local_part(each) for module in self.modules for each in module.buffers()]

    def give(self) -> dict[str, Any]:
        """Return the state as it was when the attempt began. On any thread, until the step is committed."""
        if self.keeps_all:
            return self._all
        given: dict[str, Any] = {}
        for name, value in self._objects.items():
            if name in self._other_states:
                given[name] = parts_of(self._other_states[name])
                continue
            saved = self._sharded.get(name) or value.state_dict()
            if name in self._buffers:
                saved = {**saved, **self._saved_buffers(name, saved)}
            given[name] = parts_of(saved)
            if name in self._options:
                groups = zip(given[name]["param_groups"], self._options[name], strict=False)
                given[name] = {**given[name], "param_groups": [{**now, **then} for now, then in groups]}
        return given

    def _saved_buffers(self, name: str, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        # Wrappers of modules may save buffers under other names, and some buffers are not saved.
        kept = self._buffers[name]
        found = {key: kept[key] for key in saved if key in kept}
        return found | {key: kept[f"module.{key}"] for key in saved if f"module.{key}" in kept}

    def rooms(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return tensors that may be filled before ``load``: those of modules, by their names."""
        modules = {name: each for name, each in self._objects.items() if isinstance(each, nn.Module)}
        return {name: each.state_dict() for name, each in modules.items() if name not in self._fully_sharded}

    def load(self, given: Mapping[str, Any]) -> None:
        """Load a state that another member has given."""
        for name, value in self._objects.items():
            value.load_state_dict(with_parts(value, given[name]))


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, kept in options.items():
        if isinstance(kept, torch.Tensor) and isinstance(now := group.get(key), torch.Tensor):
            now.copy_(kept)  # compiled and captured steps refer to the tensor
        else:
            group[key] = _copied(kept)


def _copied(option: Any) -> Any:
    return option if isinstance(option, int | float | str | None) else copy.deepcopy(option)
