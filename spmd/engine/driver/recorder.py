"""Records what the user's program does on the logical device, without doing it.

An operation is looked up by what is known of it beforehand: its arguments' specs, and the constants on which
the metadata of the result depends. Numbers that may change from step to step are not part of that. A known
operation costs some microseconds; for a new one, PyTorch's fake tensors and the sharding rules are asked.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

from rpc.runtime.interrupts import protected
from rpc.runtime.torch_internals import OpOverload
from spmd.engine.driver import operators
from spmd.engine.driver.aliases import Alias, Value, ViewStep, read
from spmd.engine.driver.blocks import has_blocks
from spmd.engine.driver.bounded_cache import BoundedCache
from spmd.engine.driver.operation import Operation
from spmd.engine.driver.source_positions import Position, current_position, described
from spmd.engine.errors import NotInSpmdModeError, OperationError, ReshardingError, SpmdError
from spmd.engine.program.layouts import is_local
from spmd.engine.program.metas import Spec, infer, spec_of
from spmd.engine.program.program import (
    GET_RNG_STATE,
    REDISTRIBUTE,
    SEED,
    SET_RNG_STATE,
    Layout,
    Ref,
    Scalar,
)

__all__ = ["ENTRIES_PER_PROGRAM", "Entry", "Recorder", "Recording"]

LIMIT: Final = 1000
"""Default of ``limit``, in instructions. A recording of half as many ends where it began, so that loops soon
repeat programs.
"""

ENTRIES_PER_PROGRAM: Final = 128
"""Entries that are kept for each program that is kept: a program is only found again by its entries."""

_NOTES: Final = 10_000
"""Maximum number of lines of the report."""

_FLOAT: Final = object()
_INT: Final = object()
_END: Final = object()
_reference: Final = weakref.ref
_default_dtype: Final = torch.get_default_dtype
_value_of: Final = attrgetter("value")
_PLAIN: Final = frozenset((type(None), bool, str, torch.dtype, torch.layout, torch.memory_format))
_DEVICE_WORDS: Final = frozenset(("device", "pin_memory", "non_blocking"))


Note = tuple[str, str, CodeType | None, int]
"""An operator, a note on what was redistributed and why, and the position in the user's program."""

KnownView = tuple[bool, list[tuple[Spec, ViewStep]]]
"""Whether an operation gives one view; and each view's spec, and its step from the parent."""


class Entry:
    """All that is known of an operation on arguments with certain specs.

    Attributes:
        operator: as in an instruction.
        args, kwargs: as in an instruction, with the numbers of its own tensors and scalars.
        specs: specs of its results, flattened; None for results that are not tensors.
        structure: its return value, with the number of a result in place of each tensor.
        is_flat: whether that is one tensor, or a sequence of tensors.
        moves: its tensors that must be redistributed first, and how.
        note: entry of the report, or None.
        moved_bytes: bytes of the tensors that are redistributed, except for pending reductions.
        effect: whether it must be executed even if its results are not used.
    """

    __slots__ = (
        "args",
        "effect",
        "is_flat",
        "kwargs",
        "moved_bytes",
        "moves",
        "note",
        "operator",
        "specs",
        "structure",
        "uninitialized",
    )

    def __init__(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = tuple(kwargs.items())
        self.specs: tuple[Spec | None, ...] = ()
        self.structure: Any = None
        self.is_flat = False
        self.moves: tuple[tuple[int, Layout], ...] = ()
        self.note: str | None = None
        self.moved_bytes = 0
        self.effect = False
        self.uninitialized = False


class Recording:
    """The operations recorded since the last flush.

    Attributes:
        inputs: earlier values, in the order of their first use.
        flat: the operations, of each its entry and then the numbers of its tensors: results from 0, inputs
            from -1 down.
        scalars: scalars of all operations, in order.
        positions: position in the user's program of each operation.
        made: every result, as long as it is referenced.
        default_dtype: PyTorch's default dtype for all operations.
    """

    __slots__ = ("default_dtype", "flat", "inputs", "made", "positions", "scalars")

    def __init__(self, default_dtype: torch.dtype) -> None:
        self.default_dtype = default_dtype
        self.inputs: list[Value] = []
        self.flat: list[Entry | int] = []
        self.scalars: list[Any] = []
        self.positions: list[Position] = []
        self.made: list[weakref.ref[Value] | None] = []

    @property
    def operations(self) -> list[tuple[Entry, tuple[int, ...]]]:
        """Each operation's entry, and the numbers of its tensors."""
        begins = [place for place, each in enumerate(self.flat) if isinstance(each, Entry)]
        ends = [*begins, len(self.flat)][1:]
        parts: Any = [self.flat[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return [(entry, tuple(refs)) for entry, *refs in parts]


class Recorder:
    """The program so far. Any thread may record; recordings are serialized by a lock.

    Attributes:
        strict: whether an entry of the report is an error.
        notes: number of redistributions and their bytes, by operator, note and position.
        views: what is known of views, by operation, parent and arguments.
        limit: number of instructions after which workers begin, even if no value was requested.
        changes: None, or for values of the recording that writes replaced, the new ones.
        cuts: layouts for data from the CPU, by shape and dtype, if it is not replicated.

    Args:
        run: takes a recording over, when it is long enough or ``flush`` is called.
        tensor_type: type of the users' tensors, which show what ``_alias`` refers to.
        entries: maximum number of entries, and of views, that are remembered.
    """

    def __init__(self, run: Callable[[Recording], None], tensor_type: Any, entries: int = 1 << 15) -> None:
        self.lock = threading.RLock()
        self._default_dtype = torch.get_default_dtype()
        self.recording = Recording(self._default_dtype)
        self.strict = False
        self.limit = LIMIT
        self.changes: dict[int, int] | None = None
        self.cuts: dict[tuple[object, ...], Layout] = {}
        self.notes: BoundedCache[Note, tuple[int, int]] = BoundedCache(_NOTES)
        self.views: BoundedCache[tuple[Any, ...], KnownView] = BoundedCache(entries)
        self._run = run
        self._tensor_type = tensor_type
        self._limit_of_entries = entries
        self._entries: BoundedCache[tuple[Any, ...], Entry] = BoundedCache(entries)
        self._entries_of = {self._default_dtype: self._entries}
        self._moved: dict[tuple[Value, Layout], Value] = {}

    def flush(self) -> None:
        """Hand over the recording."""
        with self.lock:
            self._flush()

    @protected
    def _flush(self) -> None:
        recording = self.recording
        if recording.flat or recording.inputs:
            self._moved.clear()
            self.recording = Recording(self._default_dtype)
            self._run(recording)

    def send(self, value: Value) -> None:
        """Hand over the recording, and a value that is still on the driver."""
        with self.lock:
            if value.data is not None:
                self._enter_value(value)
            self.flush()

    # ---- recording

    def record(
        self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Sequence[Any]:
        """Record an operation without aliases; returns its results, flattened: an ``Alias`` for each
        tensor.
        """
        return self.enter(Operation.of(operator), args, kwargs)[1]

    def enter(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[Entry, list[Any]]:
        """Record an operation.

        Args:
            args, kwargs: arguments, with ``Alias`` or logical tensors for tensors.

        Returns:
            What is known of it, and its results, flattened: an ``Alias`` for each tensor, otherwise None.
        """
        if _default_dtype() is not self._default_dtype:
            self._take_default_dtype()
        key: list[Any] = [operation]
        tensors: list[Alias] = []
        scalars: list[Any] = []
        numbers = operation.numbers
        tensor_type = self._tensor_type
        for position, arg in enumerate(args):
            kind = type(arg)
            if kind is tensor_type:
                alias = arg._alias
                if alias.parent is not None:
                    read(self, alias)
                tensors.append(alias)
                key.append(alias.spec)
            elif kind is int or kind is float:
                if position in numbers:
                    key.append(_FLOAT if kind is float else _INT)
                    scalars.append(arg)
                else:
                    key.append(arg if kind is int else (float, arg))  # 1 and 1.0 are equal
            elif arg is None or kind is bool:
                key.append(arg)
            else:
                self._flatten(arg, key, tensors, scalars, position in numbers)
        if kwargs:
            for name, arg in kwargs.items():
                if name not in _DEVICE_WORDS:
                    key.append(name)
                    self._flatten(arg, key, tensors, scalars, name in numbers)
        known = tuple(key)
        entry = self._entries[known]
        if entry is None:
            entry = self._entries[known] = self._learn(operation, args, kwargs or {}, tensors, scalars)
        if entry.note is not None:
            self._note(entry)
        return entry, self._emit(entry, tensors, scalars)

    def _take_default_dtype(self) -> None:
        """Handle that PyTorch's default dtype has changed, and with it the results of operations."""
        self.flush()
        self._default_dtype = self.recording.default_dtype = torch.get_default_dtype()
        self._entries = self._entries_of.setdefault(self._default_dtype, BoundedCache(self._limit_of_entries))

    def view(self, parent: Alias, operation: Operation, args: tuple[Any, ...]) -> Value:
        """Record a view, as a value of its own.

        Args:
            parent: the parent, whose value has been read.
            args: the other arguments; tuples for lists.
        """
        known = (operation, parent.spec, args)
        entry = self._entries[known]
        if entry is None:
            entry = self._entries[known] = self._learn(operation, (parent, *args), {}, [parent], [])
        if entry.note is not None:
            self._note(entry)
        value: Value = self._emit(entry, [parent], [])[0].value
        return value

    def _note(self, entry: Entry) -> None:
        where = current_position()
        if self.strict:
            raise ReshardingError(
                f"{entry.operator} at {described(where)}: {entry.note}. This is an error inside spmd.strict()"
            )
        note = (entry.operator, entry.note or "", *where)
        count, moved = self.notes[note] or (0, 0)
        self.notes[note] = count + 1, moved + entry.moved_bytes

    def _flatten(
        self, arg: Any, key: list[Any], tensors: list[Alias], scalars: list[Any], is_number: bool
    ) -> None:
        kind = type(arg)
        if kind is self._tensor_type:
            arg = arg._alias
            kind = Alias
        if kind is Alias:
            if arg.parent is not None:
                read(self, arg)
            tensors.append(arg)
            key.append(arg.spec)
        elif kind in _PLAIN:
            key.append(arg)
        elif kind is int or kind is float:
            if is_number:
                key.append(_FLOAT if kind is float else _INT)
                scalars.append(arg)
            else:
                key.append(arg if kind is int else (float, arg))  # 1 and 1.0 are equal
        elif kind is list or kind is tuple or isinstance(arg, (list, tuple)):
            tensor_type = self._tensor_type
            for each in arg:
                if type(each) is tensor_type:  # lists of an optimizer are long
                    alias = each._alias
                    if alias.parent is not None:
                        read(self, alias)
                    tensors.append(alias)
                    key.append(alias.spec)
                elif type(each) is int and not is_number:  # sizes
                    key.append(each)
                else:
                    self._flatten(each, key, tensors, scalars, is_number)
            key.append(_END)
        elif isinstance(arg, self._tensor_type):
            self._flatten(arg._alias, key, tensors, scalars, is_number)
        elif isinstance(arg, Tensor):
            alias = given(arg)
            tensors.append(alias)
            key.append(alias.spec)
        elif isinstance(arg, torch.Generator):
            raise NotImplementedError(
                f"expected a generator of the device 'spmd:0', got one of {arg.device}: make it with "
                "torch.Generator(device='spmd'), or leave generator= out and call torch.manual_seed"
            )
        else:
            key.append((kind, arg) if kind is complex else arg)  # 1+0j equals True

    def _emit(self, entry: Entry, tensors: list[Alias], scalars: list[Any]) -> list[Any]:
        where = current_position()
        recording = self.recording
        count = len(recording.positions)
        if 2 * count >= self.limit and (
            count >= self.limit or (entry is recording.flat[0] and where == recording.positions[0])
        ):
            self.flush()
        values = self._laid_out(entry, tensors) if entry.moves else map(_value_of, tensors)
        recording = self.recording
        flat: list[Entry | int] = [entry]
        for value in values:  # a comprehension takes longer
            index = value.index if value.recording is recording else self._enter_value(value)
            flat.append(index)
        recording.flat += flat
        if scalars:
            recording.scalars += scalars
        recording.positions.append(where)
        made = recording.made
        results: list[Any] = []
        for spec in entry.specs:
            if spec is None:
                made.append(None)
                results.append(None)
            else:
                value = Value(spec, len(made), recording)
                made.append(_reference(value))
                results.append(Alias(value, spec))
        if entry.uninitialized:
            results[0].value.uninitialized = True
        return results

    def _enter_value(self, value: Value) -> int:
        if value.remote is None:
            if value.data is None:
                raise nowhere()
        elif value.remote.error is not None:
            raise lost(value.remote.error)
        recording = self.recording
        recording.inputs.append(value)
        value.recording = recording
        value.index = -len(recording.inputs)
        return value.index

    def _laid_out(self, entry: Entry, tensors: list[Alias]) -> list[Any]:
        values: list[Any] = [alias.value for alias in tensors]
        for slot, layout in entry.moves:
            value = values[slot]
            values[slot] = self.moved(value, layout)
            if value.spec.layout.is_partial():  # so that it is reduced once
                alias = tensors[slot]
                alias.value, alias.spec = values[slot], alias.spec.laid_out(layout)
        return values

    def moved(self, value: Value, layout: Layout) -> Value:
        """Return the same value with another layout; made once in a recording."""
        if value.spec.layout == layout:
            return value
        found = self._moved.get((value, layout))
        if found is None:
            is_here = value.recording is not self.recording and isinstance(value.data, Tensor)
            if is_here and has_blocks(layout):  # it is sent there at once
                found = Value(value.spec.laid_out(layout), data=value.data)
            else:
                found = self.redistributed(value, layout)
            self._moved[(value, layout)] = found
        return found

    def redistributed(self, value: Value, layout: Layout) -> Value:
        """Like ``moved``, but moved now, even if it was moved before."""
        key = (REDISTRIBUTE, value.spec, layout)
        entry = self._entries[key]
        if entry is None:
            entry = Entry(REDISTRIBUTE, (Ref(0), layout), {})
            entry.specs, entry.structure = (value.spec.laid_out(layout),), 0
            self._entries[key] = entry
        (result,) = self._emit(entry, [Alias(value, value.spec)], [])
        made: Value = result.value
        return made

    def changed(self, old: Value, new: Value) -> None:
        """Record that a write has replaced a value by another."""
        if self.changes is not None and old.recording is new.recording is self.recording:
            self.changes[old.index] = new.index

    def derived(self, name: str, value: Value, args: tuple[Any, ...], spec: Spec) -> Value:
        """Return the result of one of this package's instructions on a value: ``args`` are its other
        arguments.
        """
        key = (name, value.spec, args, spec)
        entry = self._entries[key]
        if entry is None:
            entry = self._entries[key] = Entry(name, (Ref(0), *args), {})
            entry.specs, entry.structure = (spec,), 0
        (result,) = self._emit(entry, [Alias(value, value.spec)], [])
        made: Value = result.value
        return made

    # ---- the generator of random numbers

    def seed(self, seed: int) -> None:
        """Seed the generator that all workers share."""
        with self.lock:
            self._emit(self._special(SEED, (Scalar(0),)), [], [seed])

    def random_state(self) -> Alias:
        """Return its state at this point of the program."""
        state = Spec.of(tuple(torch.get_rng_state().shape), (1,), torch.uint8)
        with self.lock:
            (result,) = self._emit(self._special(GET_RNG_STATE, (), state), [], [])
        found: Alias = result
        return found

    def set_random_state(self, state: Alias) -> None:
        """Set its state."""
        with self.lock:
            read(self, state)
            self._emit(self._special(SET_RNG_STATE, (Ref(0),)), [state], [])

    def _special(self, name: str, args: tuple[Any, ...], *specs: Spec) -> Entry:
        entry = self._entries[(name,)]
        if entry is None:
            entry = self._entries[(name,)] = Entry(name, args, {})
            entry.specs, entry.effect = specs, True
        return entry

    # ---- the first time

    def _learn(
        self,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Alias],
        scalars: list[Any],
    ) -> Entry:
        kwargs = {name: arg for name, arg in kwargs.items() if name not in _DEVICE_WORDS}
        specs = iter([alias.spec for alias in tensors])
        real_args = tuple(_with_specs(arg, specs) for arg in args)
        real_kwargs = {name: _with_specs(arg, specs) for name, arg in kwargs.items()}
        if operation.in_place is not None:  # it may refuse what its functional form accepts
            infer(operation.in_place.overload, real_args, real_kwargs)
        returned = infer(operation.overload, real_args, real_kwargs)

        refs, numbers = iter(range(len(tensors))), iter(range(len(scalars)))
        entry = Entry(
            operation.name,
            tuple(
                _template(arg, refs, numbers, position in operation.numbers)
                for position, arg in enumerate(args)
            ),
            {name: _template(arg, refs, numbers, name in operation.numbers) for name, arg in kwargs.items()},
        )
        found: list[Spec | None] = []
        entry.structure = _structure(returned, found)
        numbers_of_all = tuple(range(len(found)))
        entry.is_flat = None not in found and (entry.structure == numbers_of_all or found == [returned])
        metas = [alias.spec.meta for alias in tensors]
        each = iter(metas)
        meta_args = tuple(_with_specs(arg, each) for arg in args)
        meta_kwargs = {name: _with_specs(arg, each) for name, arg in kwargs.items()}
        asked = operation.rules_of or operation.overload
        propagated = operators.propagate(asked, meta_args, meta_kwargs)
        layouts: Sequence[Layout] = propagated.results
        if operation.rules_of is not None:  # a result that is to replace an argument lies where that one does
            layouts = operation.layouts_in_place(args, kwargs, propagated)
        entry.specs = tuple(
            None if spec is None else spec.laid_out(layout)
            for spec, layout in zip(found, layouts, strict=False)
        )
        entry.moves = tuple(
            (slot, wanted)
            for slot, (spec, wanted) in enumerate(zip(metas, propagated.inputs, strict=True))
            if spec.layout != wanted
        )
        entry.note = propagated.note
        entry.moved_bytes = sum(
            tensors[slot].spec.nbytes
            for slot, wanted in entry.moves
            if not (metas[slot].layout.is_partial() or is_local(metas[slot].layout, wanted))
        )
        # An operation without results is done for the errors that it raises, such as the check of a
        # factorization.
        entry.effect = operation.is_random or not operation.overload._schema.returns
        entry.uninitialized = operation.is_uninitialized
        return entry


def nowhere() -> NotInSpmdModeError:
    """Return the error for a tensor that no worker of this session has, or will have."""
    return NotInSpmdModeError(
        "this tensor is lost: it was made before spmd.shutdown(), or when a worker was lost already. Make it "
        "anew; what is to outlive the mode is fetched with .cpu()"
    )


def lost(error: SpmdError) -> SpmdError:
    """Return the error for a tensor that was not computed, since an earlier operation failed."""
    if not isinstance(error, OperationError):
        return nowhere()
    again = OperationError(f"this tensor was never computed: {error}", error.where, error.operator)
    again.__cause__ = error
    return again


def given(tensor: Tensor) -> Alias:
    """Return a tensor on the CPU as an argument of an operation on the device.

    Raises:
        RuntimeError: it has dimensions.
    """
    if tensor.dim():
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found a tensor of shape "
            f"{list(tensor.shape)} on {tensor.device} among tensors on spmd:0: move it with "
            ".to(spmd.device()). Only tensors without dimensions may come from the CPU"
        )
    spec = spec_of(tensor)
    return Alias(Value(spec, data=tensor.detach().clone()), spec)


def _with_specs(arg: Any, specs: Any) -> Any:
    """Return an argument with the next ones of these in place of tensors."""
    if isinstance(arg, (Alias, Tensor)):
        return next(specs)
    if isinstance(arg, (list, tuple)):
        return [_with_specs(each, specs) for each in arg]
    return arg


def _template(arg: Any, refs: Any, numbers: Any, is_number: bool) -> Any:
    if isinstance(arg, (Alias, Tensor)):
        return Ref(next(refs))
    if is_number and type(arg) in (float, int):
        return Scalar(next(numbers))
    if isinstance(arg, (list, tuple)):
        return tuple(_template(each, refs, numbers, is_number) for each in arg)
    return arg


def _structure(tree: Any, found: list[Spec | None]) -> Any:
    """Return the result, with numbers in place of tensors."""
    if isinstance(tree, Spec):
        found.append(tree)
        return len(found) - 1
    if isinstance(tree, (list, tuple)):
        return tuple(_structure(each, found) for each in tree)
    found.append(None)
    return None
