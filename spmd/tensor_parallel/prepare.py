"""How one module is parallelized: the styles that only lay out inputs and outputs anew, with hooks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from spmd.tensor_parallel.errors import LayoutCountError, ParallelError, ParallelTypeError
from spmd.tensor_parallel.resharding import Reshard, check_layout
from spmd.tensor_parallel.site import Site
from spmd.tensor_parallel.styles import NamedStyle

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = Placement | tuple[Placement | None, ...]


class PrepareModuleInput(NamedStyle):
    """Lay out a module's inputs anew before its forward.

    Args:
        input_layouts: how plain inputs are laid out, one for each positional input, None for those to leave
            alone.
        desired_input_layouts: how they shall be laid out; as many.
        input_kwarg_layouts: the same for keyword inputs, by name; those not named pass as they are.
        desired_input_kwarg_layouts: as many.
        use_local_output: hand over plain tensors, this rank's parts, rather than ``DTensor`` s; default
            False.

    A ``DTensor`` input says itself how it is laid out. Without arguments this does nothing.

    Raises:
        LayoutCountError: given and desired layouts differ in number.
        ParallelTypeError: a layout is no placement.

    Example::

        PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts, "input_layouts")
        self.desired_input_layouts = _as_tuple(desired_input_layouts, "desired_input_layouts")
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise LayoutCountError("PrepareModuleInput: desired module inputs should not be None!")
            _check_count("input_layouts", self.input_layouts, self.desired_input_layouts)
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        for given in (self.input_kwarg_layouts, self.desired_input_kwarg_layouts):
            _as_tuple(tuple(given.values()), "keyword layouts")
        if self.with_kwargs:
            _check_count("input_kwarg_layouts", self.input_kwarg_layouts, self.desired_input_kwarg_layouts)
            unknown = self.desired_input_kwarg_layouts.keys() ^ self.input_kwarg_layouts.keys()
            if unknown:
                raise LayoutCountError(
                    f"PrepareModuleInput: expected the same names in input_kwarg_layouts and "
                    f"desired_input_kwarg_layouts, got {sorted(unknown)} in one of them only"
                )

    def parallelize(self, module: nn.Module, site: Site, src_data_rank: int | None) -> None:
        module.register_forward_pre_hook(_InputHook(self, site), with_kwargs=True)

    def __repr__(self) -> str:
        return f"PrepareModuleInput({self.arguments('use_local_output')})"

    def arguments(self, use_local: str) -> str:
        """As ``repr`` shows them."""
        return (
            f"input_layouts={self.input_layouts}, desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"{use_local}={self.use_local_output}"
        )


class PrepareModuleOutput(NamedStyle):
    """Lay out a module's outputs anew after its forward.

    Args:
        output_layouts: how plain outputs are laid out, one for each element of a tuple, None for those to
            leave alone. A list is one output.
        desired_output_layouts: how they shall be laid out; as many.
        use_local_output: give plain tensors, this rank's parts, rather than ``DTensor`` s; default True.

    Raises:
        LayoutCountError: given and desired layouts differ in number.
        ParallelTypeError: a layout is no placement.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts, "output_layouts") or ()
        self.desired_output_layouts = _as_tuple(desired_output_layouts, "desired_output_layouts") or ()
        self.use_local_output = use_local_output
        _check_count("output_layouts", self.output_layouts, self.desired_output_layouts)

    def parallelize(self, module: nn.Module, site: Site, src_data_rank: int | None) -> None:
        module.register_forward_hook(_OutputHook(self, site))

    def __repr__(self) -> str:
        return f"PrepareModuleOutput({self.arguments()})"

    def arguments(self) -> str:
        """As ``repr`` shows them."""
        return (
            f"output_layouts={self.output_layouts}, desired_output_layouts={self.desired_output_layouts}, "
            f"use_local_output={self.use_local_output}"
        )


class PrepareModuleInputOutput(NamedStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one; the output's layouts are required.

    Args:
        input_layouts: of :class:`PrepareModuleInput`, as the next three.
        desired_input_layouts: likewise.
        input_kwarg_layouts: likewise.
        desired_input_kwarg_layouts: likewise.
        use_local_input: its ``use_local_output``.
        output_layouts: of :class:`PrepareModuleOutput`, as the next two.
        desired_output_layouts: likewise.
        use_local_output: likewise.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def parallelize(self, module: nn.Module, site: Site, src_data_rank: int | None) -> None:
        self.prepare_module_input.parallelize(module, site, src_data_rank)
        self.prepare_module_output.parallelize(module, site, src_data_rank)

    def __repr__(self) -> str:
        arguments = self.prepare_module_input.arguments("use_local_input")
        return f"PrepareModuleInputOutput({arguments}, {self.prepare_module_output.arguments()})"


class _InputHook:
    def __init__(self, style: PrepareModuleInput, site: Site) -> None:
        self._style = style
        self._site = site

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        style, site = self._style, self._site
        if style.input_layouts is not None:
            inputs, kwargs = _positional(module, inputs, kwargs, len(style.input_layouts))
            if len(inputs) != len(style.input_layouts):
                raise ParallelError(
                    site.says(
                        "module inputs and input_layouts should have same length! "
                        f"Expected {len(style.input_layouts)} positional inputs, got {len(inputs)}"
                    )
                )
            inputs = _laid_out(
                inputs, style.input_layouts, style.desired_input_layouts or (), style.use_local_output, site
            )
        names = [name for name in style.input_kwarg_layouts if name in kwargs]
        changed = _laid_out(
            [kwargs[name] for name in names],
            [style.input_kwarg_layouts[name] for name in names],
            [style.desired_input_kwarg_layouts[name] for name in names],
            style.use_local_output,
            site,
            names,
        )
        return inputs, {**kwargs, **dict(zip(names, changed, strict=True))}


def _positional(
    module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with so many positional inputs, if those that are missing were given as keywords."""
    if len(inputs) >= count:
        return inputs, kwargs
    names = [*inspect.signature(type(module).forward).parameters][1:]  # without self
    missing = names[len(inputs) : count]
    if len(inputs) + len(missing) < count or not kwargs.keys() >= set(missing):
        return inputs, kwargs
    left = {name: value for name, value in kwargs.items() if name not in missing}
    return (*inputs, *(kwargs[name] for name in missing)), left


class _OutputHook:
    def __init__(self, style: PrepareModuleOutput, site: Site) -> None:
        self._style = style
        self._site = site

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        style, site = self._style, self._site
        every = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(every) != len(style.output_layouts):
            raise ParallelError(
                site.says(
                    "module outputs and output_layouts should have same length! "
                    f"Expected {len(style.output_layouts)} outputs, got {len(every)}"
                )
            )
        prepared = _laid_out(
            every, style.output_layouts, style.desired_output_layouts, style.use_local_output, site
        )
        return prepared[0] if len(prepared) == 1 else prepared


def _laid_out(
    tensors: Sequence[Any],
    given: Sequence[Placement | None],
    desired: Sequence[Placement | None],
    local: bool,
    site: Site,
    names: Sequence[str] | None = None,
) -> tuple[Any, ...]:
    labels = [f"argument {name}" for name in names] if names else [f"tensor {i}" for i in range(len(tensors))]
    return tuple(
        tensor if source is None else _one_laid_out(tensor, source, target, local, site, label)
        for tensor, source, target, label in zip(tensors, given, desired, labels, strict=True)
    )


def _one_laid_out(
    tensor: Tensor, source: Placement, target: Placement | None, local: bool, site: Site, label: str
) -> Tensor:
    site.check_input(tensor, label)
    if local and not isinstance(tensor, DTensor):
        if target is None or source == target:
            return tensor
        return Reshard.apply(tensor, source, target, site)  # type: ignore[no-any-return, no-untyped-call]
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, site.mesh, (source,), run_check=False)
    if target is not None and source != target:
        tensor = tensor.redistribute(placements=(target,))
    return tensor.to_local() if local else tensor


def _as_tuple(layouts: Any, what: str) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    every = (layouts,) if isinstance(layouts, Placement) else layouts
    if not isinstance(every, tuple | list) or any(not isinstance(each, Placement | None) for each in every):
        raise ParallelTypeError(
            f"expected {what} to be a Placement or a tuple of them and None, got {layouts!r}"
        )
    for each in every:
        if each is not None:
            check_layout(each, what)
    return tuple(every)


def _check_count(
    what: str, given: Sequence[Any] | Mapping[str, Any], desired: Sequence[Any] | Mapping[str, Any]
) -> None:
    if len(given) != len(desired):
        raise LayoutCountError(
            f"{what} and desired_{what} should have same length! Got {len(given)} and {len(desired)}"
        )
