"""The local operations of a program: what each needs and does to its inputs, and how it is computed.

Matrices are 3 x 3, of float64. With integer leaves all values and gradients are integers: what may grow is
wrapped back to -1, 0 and 1 by ``bounded``, whose gradient is the identity. So gradients do not vanish, any
order of summing them is exact, and they can be compared bit by bit.

Large values are matrices repeated many times. What is made of them weighs their copies such that the weights
nearly cancel out: else each would multiply the gradient by some thousands, and a few lose all precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
import torch._dynamo  # what the first checkpoint would import, for a second or more in every worker
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.autograd.custom_functions import Linear, NonLinear, Two, TwoMaterialized
from tests.fuzz.autograd.program import Numbers

_TILES = (
    *((26, 34), (26, 35), (26, 36)),  # 64 KB less 1,888 bytes, less 16, and 1,856 more: in shared memory
    *((52, 70), (53, 69), (53, 69), (53, 69), (54, 71)),  # 256 KB less 64 bytes, and more: in chunks
    *((94, 96), (95, 96), (95, 96)),  # 640 KB less 5,632 bytes, and 1,280 more: over bulk streams
    (242, 241),  # 4 MB
)
"""How often a matrix is repeated in a large value, down and across, by variant: about where messages begin to
travel otherwise.
"""


class Kind(Enum):
    """What a value is."""

    MATRIX = "3 x 3"
    SCALAR = "0-dim"
    LARGE = "many 3 x 3 side by side"
    INTEGERS = "int64, 3 or 3 x 3"
    REFERENCE = "an RRef to a list of values"


class Scene(Protocol):
    """What an operation finds on its worker."""

    numbers: Numbers
    module: torch.nn.Module
    embedding: torch.nn.Embedding

    def record(self, key: str, seen: Tensor | None) -> None:
        """Notes what user code was given in a backward pass."""
        ...

    def retain(self, key: str, value: Tensor) -> None:
        """Has the gradient of an intermediate value kept, for comparison."""
        ...

    def visit(self, value: Tensor) -> Tensor:
        """Sends a value to another worker and back."""
        ...


Compute = Callable[[Scene, str, int, tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Rule:
    """What the generator must know of an operation.

    Attributes:
        compute: gets the scene, the step's key, the variant and the inputs; returns the outputs.
        inputs: their kinds.
        outputs: their kinds.
        saves: its backward needs the inputs, so they must not be changed in place any more.
        final: its outputs must not be changed in place.
        view: its output shares memory with the first input.
        overlaps: elements of its output share memory, as they do where it has been sent.
        changes: it changes its first input in place.
        needs_grad: its first input must require grad.
        own_parameters: it uses parameters of the worker, so that its outputs require grad anyway.
        sparse: the gradient of its input is sparse: that must be a leaf without a hook, or a copy of one.
        calls: it waits for another worker, and its nodes are not the same in one process and over several.
        cuts: its outputs don't require grad.
        cuts_others: they do only if the first input does.
        numbers: if given, the programs that have it.
    """

    compute: Compute
    inputs: tuple[Kind, ...]
    outputs: tuple[Kind, ...]
    saves: bool = False
    final: bool = False
    view: bool = False
    overlaps: bool = False
    changes: bool = False
    needs_grad: bool = False
    own_parameters: bool = False
    sparse: bool = False
    calls: bool = False
    cuts: bool = False
    cuts_others: bool = False
    numbers: Numbers | None = None


OPERATIONS: dict[str, Rule] = {}
_M = Kind.MATRIX


def _operation(
    inputs: tuple[Kind, ...], outputs: tuple[Kind, ...] = (Kind.MATRIX,), **properties: bool | Numbers
) -> Callable[[Compute], Compute]:
    def register(compute: Compute) -> Compute:
        name = compute.__name__.removeprefix("_")
        OPERATIONS[name] = Rule(compute, inputs, outputs, **properties)  # type: ignore[arg-type]
        return compute

    return register


def bounded(x: Tensor, numbers: Numbers) -> Tensor:
    """``x`` brought back to between -1 and 1 as if by adding a constant: the gradient is the identity."""
    with torch.no_grad():
        target = x.tanh() if numbers is Numbers.REALS else (x + 1).remainder(3) - 1
        shift = target - x
    return x + shift


def _inner(x: Tensor) -> Tensor:
    """``x`` itself, or what stands for it if it is a leaf: then no custom function is applied to the leaf.

    Those of modules' hooks and checkpoints count, too. PyTorch 2.13 hangs where one thread, with the
    interpreter in hand, applies one to a leaf, while another makes the leaf's node without it.
    """
    return x if x.grad_fn is not None or not x.requires_grad else x.view_as(x)


@_operation((_M, _M))
def _add(scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    total = x[0] + x[1]
    return (bounded(total, scene.numbers) if variant & 1 else total,)


@_operation((_M, _M), saves=True)
def _multiply(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (bounded(x[0] * x[1], scene.numbers),)


@_operation((_M, _M), saves=True)
def _matrix_multiply(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (bounded(x[0] @ x[1], scene.numbers),)


@_operation((_M,), saves=True, final=True, numbers=Numbers.REALS)
def _tanh(_scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0].tanh(),)


@_operation((_M, _M))
def _twist(_scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0].t()[[2, 0, 1]].reshape(9).view(3, 3) + x[1].flip(0)[:, [1, 0, 2]],)


@_operation((_M,), view=True)
def _view(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((x[0].t(), x[0].unsqueeze(0).squeeze(0), x[0][:], x[0].view_as(x[0]))[variant % 4],)


@_operation((_M,), view=True, overlaps=True, final=True)
def _spread(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0][variant % 3].expand(3, 3),)


@_operation((_M,), view=True, overlaps=True, final=True, saves=True)
def _part(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One of several views that one operation makes; no such base may be changed in place."""
    return (x[0].unbind(variant % 2)[variant % 3].expand(3, 3),)


@_operation((_M, _M), (_M, _M), saves=True)
def _split(scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    rows = x[0].unbind(0)
    left, right = torch.split(x[1], [1, 2], 1)
    stacked = torch.stack([rows[variant % 3], rows[0], rows[variant % 3]])
    return bounded(stacked * left, scene.numbers), torch.cat([right, left], 1) + x[0]


@_operation((_M, _M), (), changes=True)
def _change(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    target, source = x
    match variant % 6:
        case 0:
            target.add_(source)
        case 1:
            target.mul_(2).add_(source)
        case 2:
            target[0].add_(source[1])
        case 3:
            target[:, 1].neg_().add_(source[0])
        case 4:
            target.t().sub_(source)
        case 5:
            target[2] = source[0]
    return ()


@_operation((_M,))
def _linear(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (Linear.run(_inner(x[0]), scene.record, key),)


@_operation((_M,))
def _nonlinear(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (NonLinear.run(_inner(x[0]), scene.record, key),)


@_operation((_M, _M), (_M, _M, Kind.INTEGERS), saves=True)
def _two(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    product, total, signs = Two.run(_inner(x[0]), _inner(x[1]), scene.record, key)
    return bounded(product, scene.numbers), total, signs


@_operation((_M, _M), saves=True)
def _half(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradient of the second input is undefined, though it takes part."""
    return Two.run(_inner(x[0]), _inner(x[1]), scene.record, key)[1:2]


@_operation((_M,), (_M, _M))
def _two_materialized(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return TwoMaterialized.run(_inner(x[0]), scene.record, key)


@_operation((_M,), needs_grad=True)
def _hook(scene: Scene, key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A tensor hook: one that only looks, one that is linear, one that is not."""
    hooked = x[0] * 1

    def hook(gradient: Tensor | None) -> Tensor | None:
        scene.record(key, gradient)
        if gradient is None or variant % 3 == 0:
            return None
        return gradient * 2 if variant % 3 == 1 else gradient.clamp(-3, 3)

    hooked.register_hook(hook)  # type: ignore[no-untyped-call]
    return (hooked,)


@_operation((_M,), final=True, needs_grad=True)
def _retain(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    kept = x[0] * 1
    scene.retain(key, kept)
    return (kept,)


@_operation((_M,), saves=True, final=True, needs_grad=True, own_parameters=True)
def _module(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (scene.module(_inner(x[0])),)


@_operation((_M, _M), saves=True, own_parameters=True)
def _embed(scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A sparse gradient, and in one variant of two a dense one for the same parameter."""
    found = bounded(
        scene.embedding(torch.tensor([0, 2, 1 + variant % 2], device=x[0].device)) * x[0], scene.numbers
    )
    return (found + scene.embedding.weight * x[1] if variant & 1 else found,)


@_operation((_M, _M), saves=True)
def _checkpoint(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    def compute(a: Tensor, b: Tensor) -> Tensor:
        scene.record(key, None)  # run again in the backward pass, once
        return bounded((a * b) @ b, scene.numbers)

    result: Tensor = checkpoint(compute, _inner(x[0]), _inner(x[1]), use_reentrant=False)
    return (result,)


@_operation((_M,), saves=True, calls=True)
def _checkpoint_call(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The backward pass calls the other worker once more."""

    def compute(a: Tensor) -> Tensor:
        return bounded(scene.visit(a * a) * a, scene.numbers)

    result: Tensor = checkpoint(compute, _inner(x[0]), use_reentrant=False)
    return (result,)


@_operation((_M,), needs_grad=True)
def _ask(scene: Scene, key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook that calls another worker in the backward pass."""
    hooked = x[0] * 1

    def hook(gradient: Tensor | None) -> Tensor | None:
        scene.record(key, gradient)
        return None if gradient is None else scene.visit(gradient) * 2

    hooked.register_hook(hook)  # type: ignore[no-untyped-call]
    return (hooked,)


@_operation((_M,), sparse=True)
def _look_up(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Rows of a table, whose gradient is sparse."""
    rows = torch.tensor([0, 2, variant % 3], device=x[0].device)
    return (torch.nn.functional.embedding(rows, x[0], sparse=x[0].is_cpu) * 2,)


@_operation((_M, _M), cuts_others=True)
def _no_grad(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        factor = bounded(x[1] * 2 + 1, scene.numbers)
    return (x[0] * factor + x[0].detach() * 2,)


@_operation((_M,), cuts=True)
def _detach(_scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0].detach() * 2,)


@_operation((_M,), (Kind.INTEGERS,), cuts=True)
def _largest(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0].argmax(variant % 2),)


@_operation((_M, Kind.INTEGERS), saves=True)
def _weigh(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (bounded(x[0] * (x[1] + 1).to(x[0].dtype), scene.numbers),)


@_operation((_M,), (Kind.SCALAR,))
def _total(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (bounded(x[0].sum(), scene.numbers),)


@_operation((_M, Kind.SCALAR), saves=True)
def _scale(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (bounded(x[0] * x[1], scene.numbers),)


@_operation((_M,), (Kind.LARGE,))
def _tile(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0].repeat(*_TILES[variant]),)


def bytes_of_tiles(variant: int) -> int:
    """The size of what ``tile`` makes."""
    down, across = _TILES[variant]
    return down * across * 3 * 3 * torch.float64.itemsize


@_operation((Kind.LARGE, _M), (Kind.LARGE,), saves=True)
def _weave(scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    down, across = x[0].shape
    return (bounded(x[0] * x[1].repeat(down // 3, across // 3), scene.numbers),)


@_operation((Kind.LARGE,), (Kind.LARGE,))
def _turn(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """In one variant a view that is not contiguous, nor is its gradient."""
    return (x[0].t() if variant & 1 else x[0].flip(0),)


@_operation((Kind.LARGE,))
def _cut(_scene: Scene, _key: str, variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (x[0][:3, -3:] + x[0][variant : variant + 3, :3],)


@_operation((Kind.LARGE,))
def _fold(_scene: Scene, _key: str, _variant: int, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradient has no zeros: it is there from the first chunk to the last."""
    tiles = torch.unflatten(torch.unflatten(x[0], 1, (-1, 3)), 0, (-1, 3))
    down, across = tiles.shape[0], tiles.shape[2]
    signs = 1.0 - 2.0 * (torch.arange(down * across, dtype=torch.float64, device=x[0].device) % 2)
    signs[-1] = 2.0
    return ((tiles * signs.view(down, 1, across, 1)).sum((0, 2)),)
