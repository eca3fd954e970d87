"""Which modules inside a model are wrapped by themselves: policies, and the walk that asks them.

A policy is called as ``policy(module, recurse, unwrapped_params)``: with ``recurse``, whether to look into
the module's children; without, whether to wrap the module itself, in which ``unwrapped_params`` numbers are
not wrapped yet. Policies of ``torch.distributed.fsdp.wrap`` are called in the same way and serve as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

from torch import nn

__all__ = [
    "Policy",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "recursive_wrap",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

Policy: TypeAlias = Callable[..., bool]
"""See above."""

_NEVER_WRAPPED: Final = frozenset({nn.ModuleList, nn.ModuleDict})
_LEAVES: Final = frozenset({nn.MultiheadAttention})


def always_wrap_policy(*_args: Any, **_kwargs: Any) -> bool:
    """Wraps every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps the modules of which ``lambda_fn(module)`` is true; bind it with ``functools.partial``."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wraps the modules of these classes, such as a model's layers.

    Example::

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wraps modules with at least this many numbers that are not wrapped yet.

    Args:
        min_num_params: how many.
        force_leaf_modules: classes whose children are left alone. Default: ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes that are not wrapped. Default: lists and dicts of modules.
    """
    others = force_leaf_modules if recurse else exclude_wrap_modules
    if others is None:
        others = _LEAVES if recurse else _NEVER_WRAPPED
    return unwrapped_params >= min_num_params and not isinstance(module, tuple(others))


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Policy,
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the modules inside a module for which a policy says so, inner ones first.

    Args:
        module: changed in place.
        auto_wrap_policy: see above.
        wrapper_cls: called as ``wrapper_cls(module, **kwargs)``, and gives what stands in the module's place.
        ignored_modules: not looked at.
        ignored_params: not counted.
        only_wrap_children: leave the module itself.

    Returns:
        the module, wrapped or not, and how many numbers are wrapped now.

    Raises:
        ValueError: a module inside is wrapped already.
    """
    if isinstance(wrapper_cls, type):
        for name, each in module.named_modules():
            if each not in ignored_modules and isinstance(each, wrapper_cls):
                raise ValueError(
                    f"{name or 'the module'} is wrapped already: auto_wrap_policy is for a plain module"
                )
    ignored = {id(each) for each in ignored_params}
    total = sum(each.numel() for each in module.parameters() if id(each) not in ignored)
    if not auto_wrap_policy(module, True, total):
        return module, 0
    wrapped = 0
    for name, child in module.named_children():
        if child in ignored_modules:
            continue
        new, count = recursive_wrap(
            child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
        )
        setattr(module, name, new)
        wrapped += count
    if not only_wrap_children and auto_wrap_policy(module, False, total - wrapped):
        return wrapper_cls(module, **kwargs), total
    return module, wrapped
