"""Properties of operators from their schemas: views, changes of arguments, and functional counterparts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import torch

from rpc.runtime.torch_internals import OpOverload
from spmd.engine.program.program import Layout

__all__ = ["Operation"]

aten: Final = torch.ops.aten

_BY_NAME: Final = {
    "aten::normal_": "normal_functional",
    "aten::__ilshift__": "__lshift__",
    "aten::__irshift__": "__rshift__",
}

_SHAPED_BY_NUMBERS: Final = ("arange", "linspace", "logspace", "range")
_CHOSEN_BY_NUMBERS: Final = ("norm", "_cdist", "cdist", "renorm", "dist", "p_norm")


class Operation:
    """One operator overload.

    Attributes:
        overload: PyTorch's overload.
        name: its name, such as ``aten::add.Tensor``.
        numbers: positions and names of the arguments whose numbers may change from run to run.
        is_view: whether its result shares memory with its first argument.
        mutated: positions, or names, of the arguments that it changes.
        returned: those of them that it returns.
        mutates_first: whether it changes its first argument, a tensor, and nothing else.
        pure: for one that changes arguments, the operation that returns their new values.
        rules_of: the overload whose sharding rules apply, if that is another one.
        is_reshaping: whether it makes its first argument a view of its previous value.
        is_indexing: whether its second argument is a list of indices.
        is_of_lists: whether it is one operation for each index of its lists.
        is_random: whether it draws random numbers.
        is_uninitialized: whether its result has undefined content.
        handler: the whole implementation, for one that is not simply recorded.
    """

    _known: ClassVar[dict[int, Operation]] = {}  # by identity: overloads are hashed in Python

    def __init__(self, overload: OpOverload) -> None:
        schema: Any = overload._schema
        self.overload = overload
        self.name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        packet = schema.name.removeprefix("aten::")
        self.numbers: frozenset[int | str] = frozenset()
        if not packet.startswith(_SHAPED_BY_NUMBERS) and not any(
            part in packet for part in _CHOSEN_BY_NUMBERS
        ):
            self.numbers = frozenset(
                key
                for position, argument in enumerate(schema.arguments)
                if _is_number(argument)
                for key in (position, argument.name)
            )
        marks = [each.alias_info for each in schema.arguments]
        self.mutated: tuple[int | str, ...] = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.is_write
        )
        given_back = {
            name for each in schema.returns if each.alias_info for name in each.alias_info.before_set
        }
        self.returned: tuple[int | str, ...] = tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.is_write and argument.alias_info.before_set & given_back
        )
        self.mutates_first = (
            self.mutated == (0,)
            and str(schema.arguments[0].type) == "Tensor"
            and [str(each.type) for each in schema.returns] == ["Tensor"]
        )
        self.is_view = not self.mutated and bool(marks) and marks[0] is not None
        self.is_out = bool(self.mutated) and isinstance(self.mutated[0], str)
        self.is_reshaping = torch.Tag.inplace_view in overload.tags and packet not in ("set_", "resize_")
        self.is_indexing = packet.strip("_") in ("index", "index_put", "index_put_impl")
        self.is_of_lists = packet.startswith("_foreach_")
        self.is_random = torch.Tag.nondeterministic_seeded in overload.tags
        self.is_uninitialized = packet in (
            "empty",
            "empty_strided",
            "empty_like",
            "new_empty",
            "new_empty_strided",
        )
        self.returns_nothing = not schema.returns
        self.rules_of: OpOverload | None = None
        self.handler: Callable[..., Any] | None = None
        self._pure: Operation | None = None

    @classmethod
    def of(cls, overload: OpOverload) -> Operation:
        """Return the operation of an overload."""
        found = cls._known.get(id(overload))
        if found is None:
            found = cls._known[id(overload)] = cls(overload)
        return found

    @property
    def pure(self) -> Operation:
        """The operation that returns the new values of this one's arguments.

        Raises:
            NotImplementedError: there is none.
        """
        if self._pure is None:
            self._pure = Operation(_functional(self.overload))
            if not self.is_out:
                self._pure.rules_of = self.overload
                self._pure.in_place = self
        return self._pure

    in_place: Operation | None = None

    def layouts_in_place(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], propagated: Any
    ) -> Sequence[Layout]:
        """Return the layouts of the results of the functional form, if the rules were asked about the
        in-place form.

        The replacement of an argument has that argument's layout; but a partial sum may be replaced by a
        replicated tensor.
        """
        assert self.in_place is not None
        if self.in_place.mutates_first and propagated.inputs[0].is_partial():
            return list(propagated.results)
        found: list[Layout] = []
        first = 0
        for position, arg in enumerate(args):
            count = _count(arg)
            if position in self.in_place.mutated:
                found += propagated.inputs[first : first + count]
            first += count
        return found


def _count(tree: Any) -> int:
    if isinstance(tree, (list, tuple)):
        return sum(_count(each) for each in tree)
    return int(isinstance(tree, torch.Tensor) or hasattr(tree, "spec"))


def _is_number(argument: Any) -> bool:
    """Whether an argument is a number whose value does not affect the result's metadata, except for
    dtypes.
    """
    kind = str(argument.type)
    return (
        kind in ("number", "float", "Optional[number]", "Optional[float]", "List[number]") or kind == "Tensor"
    )


def _functional(overload: OpOverload) -> OpOverload:
    schema: Any = overload._schema
    name = schema.name.removeprefix("aten::")
    plain = _BY_NAME.get(schema.name) or (name.removesuffix("_"))
    packet = getattr(aten, plain, None)
    wanted = _shape_of([each for each in schema.arguments if not each.is_out])
    candidates = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    for candidate in candidates:
        if _shape_of(candidate._schema.arguments) == wanted and not _writes(candidate):
            found: OpOverload = candidate
            return found
    raise NotImplementedError(
        f"{schema.name}.{schema.overload_name} changes its arguments, and no form of it does not, so that it "
        "cannot be done on spmd:0: call it without out=, or compute this part on the CPU"
    )


def _writes(overload: Any) -> bool:
    return any(
        each.alias_info is not None and each.alias_info.is_write for each in overload._schema.arguments
    )


def _shape_of(arguments: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in arguments]
