from __future__ import annotations

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from spmd.fsdp import checkpoint_module
from spmd.fsdp.wrap import (
    Policy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, note: str = "") -> None:
        super().__init__()
        self.module, self.note = module, note


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.ReLU()))


def wrapped(policy: Policy) -> list[str]:
    """The names of the modules that a policy wraps, as they were called before."""
    module, _ = recursive_wrap(model(), policy, Wrapped)
    names = (name for name, each in module.named_modules() if isinstance(each, Wrapped))
    return [name.replace("module.", "").replace("module", "") for name in names]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (always_wrap_policy, ["", "0", "1", "1.0", "1.1"]),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.ReLU)), ["1.1"]),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}), ["0", "1.0"]),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=9), ["1.0"]),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=10), [""]),
        (
            functools.partial(
                size_based_auto_wrap_policy, min_num_params=10, exclude_wrap_modules={nn.Sequential}
            ),
            [],
        ),
        (ModuleWrapPolicy({nn.Linear}), ["0", "1.0"]),
    ],
)
def test_a_policy_says_what_is_wrapped(policy: Policy, expected: list[str]) -> None:
    assert [name.strip(".") for name in wrapped(policy)] == expected


def test_a_policy_hears_how_much_is_not_wrapped_yet() -> None:
    heard = []

    def policy(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        heard.append((type(module).__name__, recurse, unwrapped_params))
        return True

    _, count = recursive_wrap(model(), policy, Wrapped, only_wrap_children=True)
    assert count == 15
    assert heard[:2] == [("Sequential", True, 15), ("Linear", True, 6)]
    assert heard[-1] == ("Sequential", False, 0)


def test_options_reach_the_wrapper() -> None:
    module, _ = recursive_wrap(nn.Linear(2, 2), always_wrap_policy, Wrapped, note="hello")
    assert module.note == "hello"


def test_a_module_inside_that_is_wrapped_already_is_refused() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Sequential(Wrapped(nn.ReLU())))
    with pytest.raises(ValueError, match=r"1\.0 is wrapped already"):
        recursive_wrap(module, always_wrap_policy, Wrapped)


def test_a_copy_of_a_module_that_computes_again_has_its_own_parameters() -> None:
    module = checkpoint_module(checkpoint_module(nn.Linear(2, 1, bias=False)))
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.fill_(3.0)
    x = torch.ones(1, 2, requires_grad=True)
    found = copied(x)
    assert found.item() == 6.0
    torch.autograd.backward(found)
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0]]
    assert module.weight.grad is None
    assert list(inspect.signature(module.forward).parameters) == ["input"]
