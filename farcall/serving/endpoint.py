"""Endpoints: what is served, and its description."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import nn

from farcall.serving.errors import BadArguments, contained
from farcall.serving.slots import Slots
from farcall.serving.tensors import DTYPES
from rpc.api import UNSET_RPC_TIMEOUT, rpc_async
from rpc.errors import RRefError
from rpc.runtime.own_streams import OwnStreams
from rref import RemoteModule, RRef
from rref.remote_module.owner import call_on_device

__all__ = ["Batching", "Endpoint", "TensorSpec"]

_END: Final = object()

_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The required dtype and shape of a tensor.

    Args:
        dtype: PyTorch's dtype, or its name, such as ``"float32"``.
        shape: sizes; -1 for any.

    Raises:
        ValueError: there is no such dtype.
    """

    dtype: torch.dtype | str
    shape: Sequence[int]

    def __post_init__(self) -> None:
        name = str(self.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"{self.dtype!r} is no dtype; there are {', '.join(sorted(DTYPES))}")
        object.__setattr__(self, "dtype", DTYPES[name])
        object.__setattr__(self, "shape", tuple(self.shape))

    @property
    def dtype_name(self) -> str:
        """PyTorch's name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    def check(self, name: str, value: object) -> None:
        """Check an argument.

        Raises:
            BadArguments: it is something else.
        """
        if isinstance(value, torch.Tensor):
            fits = len(value.shape) == len(self.shape) and all(
                wanted in (-1, size) for wanted, size in zip(self.shape, value.shape, strict=True)
            )
            if fits and value.dtype == self.dtype:
                return
            came = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        else:
            came = type(value).__qualname__
        raise BadArguments(f"{name} must be a tensor {self.dtype_name}{list(self.shape)}, {came} came")


@dataclass(frozen=True, slots=True)
class Batching:
    """Run calls that arrive together as one, with their tensors concatenated along the first dimension.

    It is for functions of tensors whose rows are independent, such as a model in evaluation: all arguments
    are tensors with the same number of rows, and so are the results. Calls with other dtypes, other sizes
    (except for the first), or arguments that are not tensors are not combined.

    Args:
        max_batch_size: maximum number of rows; a call with more runs alone.
        max_delay: time in seconds that the first call waits for others, or longer if the server has no free
            slot. If clients need longer than that for all their calls to arrive, batches stay small.
    """

    max_batch_size: int = 32
    max_delay: float = 0.002

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or not self.max_delay >= 0:  # it may be nan
            raise ValueError("max_batch_size is at least 1 and max_delay at least 0")


@dataclass(frozen=True)
class Endpoint:
    """Something that is served under a name.

    Args:
        call: a function, ``async def``, generator (for streams), module, or any callable; an ``RRef`` to one,
            a ``RemoteModule`` or a sharded model, which are called where they are. Modules run in
            ``torch.inference_mode``.
        inputs: required tensors among the arguments, by name.
        outputs: tensors of the result, by name, in order.
        batching: run calls that arrive together as one.
        doc: text for ``Describe``; default: the docstring.

    Example::

        Endpoint(model, inputs={"images": TensorSpec("float32", (-1, 64))}, batching=Batching(64))

    Raises:
        TypeError: it cannot be called.
        ValueError: ``inputs`` has a name that is not one of its parameters.
    """

    call: Any
    inputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    outputs: Mapping[str, TensorSpec] = field(default_factory=dict)
    batching: Batching | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.call, (RRef, RemoteModule)) and not callable(self.call):
            raise TypeError(f"{self.call!r} cannot be called, so it cannot be served")
        if self.streams and self.batching:
            raise TypeError("a generator cannot be batched")
        if self.signature is not None:
            _check_names(self.inputs, self.signature)

    @cached_property
    def streams(self) -> bool:
        """Whether it has many results, one after the other."""
        return _is(inspect.isgeneratorfunction, self.call) or _is(inspect.isasyncgenfunction, self.call)

    @cached_property
    def _is_async(self) -> bool:
        return _is(inspect.iscoroutinefunction, self.call)

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """The signature of ``call``, if it is available here."""
        if isinstance(self.call, (RRef, RemoteModule)):
            return None
        target = self.call.forward if isinstance(self.call, nn.Module) else self.call
        try:
            return inspect.signature(target)
        except (TypeError, ValueError):
            return None

    @cached_property
    def order(self) -> list[str]:
        """The names of arguments by position: of parameters, and then those of ``inputs`` that are not
        parameters, which ``*args`` accepts.
        """
        seen = self.signature
        parameters: Iterable[inspect.Parameter] = () if seen is None else seen.parameters.values()
        named = {each.name: each.kind for each in parameters if each.kind not in _VARIADIC}
        by_position = [name for name, kind in named.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
        return by_position + [name for name in self.inputs if name not in named]

    @property
    def text(self) -> str:
        """A description of what it does."""
        if self.doc or isinstance(self.call, (RRef, RemoteModule)):
            return self.doc
        call = self.call.func if isinstance(self.call, partial) else self.call
        return inspect.cleandoc(call.__doc__ or "")

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check arguments before anything is run.

        Raises:
            BadArguments: it does not take them.
        """
        if self.signature is not None:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise BadArguments(str(error)) from None
        for name, given in (*zip(self.order, args, strict=False), *kwargs.items()):
            if name in self.inputs:
                self.inputs[name].check(name, given)

    async def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, seconds: float | None, slots: Slots
    ) -> Any:
        """Return the result of one call.

        Cancelling it cancels an ``async def`` and a remote call; a function in a thread runs to its end.
        """
        if isinstance(self.call, (RRef, RemoteModule)):
            async with slots:
                return await _run_at_owner(self.call, args, kwargs, seconds)
        if self._is_async:
            async with slots:
                return await OwnStreams().follow(_awaited(self.call, args, kwargs))
        return await slots.in_thread(OwnStreams().around(_called), self.call, args, kwargs)

    async def stream(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], slots: Slots
    ) -> AsyncIterator[Any]:
        """Yield the results of a generator, which is closed when no more results are requested.

        Each step takes a slot. A plain generator has a thread of its own, which ends with the executor:
        PyTorch's modes, such as ``torch.no_grad``, belong to a thread, and last from step to step. So do
        current streams.
        """
        streams = OwnStreams()
        if _is(inspect.isasyncgenfunction, self.call):
            results = self.call(*args, **kwargs)
            try:
                while (each := await streams.follow(_next(results, slots))) is not _END:
                    yield each
            finally:
                with contained():
                    await streams.follow(results.aclose())
            return
        generator: Generator[Any, Any, Any] = self.call(*args, **kwargs)
        own = ThreadPoolExecutor(1, thread_name_prefix="farcall stream")
        own.submit(int)  # a stream for which no thread can be started fails here, before it has a slot
        step, close = streams.around(next), streams.around(generator.close)
        in_own = partial(slots.in_thread, abandoned=close, executor=own)
        while (each := await in_own(step, generator, _END)) is not _END:
            try:
                yield each
            except GeneratorExit:
                await in_own(close)
                raise


def _check_names(inputs: Mapping[str, TensorSpec], signature: inspect.Signature) -> None:
    """Where all parameters have names, check that those of ``inputs`` are among them."""
    parameters = signature.parameters
    unknown = [name for name in inputs if name not in parameters]
    if unknown and not any(each.kind in _VARIADIC for each in parameters.values()):
        raise ValueError(
            f"inputs has {', '.join(map(repr, unknown))}, but the parameters are called "
            f"{', '.join(map(repr, parameters)) or 'nothing: there are none'}"
        )


async def _awaited(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with contained():
        return await call(*args, **kwargs)


async def _next(results: AsyncIterator[Any], slots: Slots) -> Any:
    async with slots:
        with contained():
            return await anext(results, _END)


def _is(question: Callable[[Any], bool], call: object) -> bool:
    return question(call) or question(getattr(call, "__call__", None))  # noqa: B004


def _called(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(call, nn.Module):
        with torch.inference_mode():
            return call(*args, **kwargs)
    return call(*args, **kwargs)


def _call_referenced(reference: RRef[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _called(reference.local_value(), args, kwargs)


def _call_module_on_device(*how: Any) -> Any:
    with torch.inference_mode():
        return call_on_device(*how)


async def _run_at_owner(
    called: RRef[Any] | RemoteModule, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float | None
) -> Any:
    timeout = UNSET_RPC_TIMEOUT if seconds is None else max(seconds, 0.001)
    function: Callable[..., Any] = _call_referenced
    where: tuple[Any, ...] = ()
    if isinstance(called, RRef):
        reference = called
    else:
        reference = called.get_module_rref()
        if called.device != "cpu":
            function, where = _call_module_on_device, (called.device, called.is_device_map_set)
    owner = reference.owner()
    try:
        call = rpc_async(owner, function, args=(reference, *where, args, kwargs), timeout=timeout)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            raise
    except RRefError:
        await rpc_async(owner, os.getpid, timeout=timeout)  # it may be gone, and with it the reference
        raise
