"""A program on one worker: linked once to operators, process groups and shapes, then one flat function.

Linking resolves each instruction to a function of local tensors and puts the worker's own shapes into its
arguments (``spmd.engine.rules``). Passes then rewrite the list of steps. The result becomes the source of one
Python function, a line for each step: values are its local variables, dropped after their last use.

Values that are inputs and not outputs belong to the run: their memory may be overwritten.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from rpc.runtime.torch_internals import OpOverload, pytree
from spmd.engine.program.layouts import local_shape, plan
from spmd.engine.program.metas import contiguous_stride
from spmd.engine.program.program import (
    FROM_LOCAL,
    GET_RNG_STATE,
    REDISTRIBUTE,
    SEED,
    SET_RNG_STATE,
    TO_LOCAL,
    Instruction,
    MeshKey,
    Meta,
    Program,
    Ref,
)
from spmd.engine.program.redistribution import Groups, move
from spmd.engine.rules.catalog import (
    LOCAL_RULES,
    Local,
    OperatorCall,
    Site,
    is_random,
    tensors_of,
    with_generator,
)
from spmd.engine.rules.empty import zeros_instead
from spmd.engine.worker.accelerated import CommonGenerator
from spmd.engine.worker.default_dtype import DefaultDtype
from spmd.engine.worker.local_calls import Assembled, InstructionError, LocalCall
from spmd.engine.worker.passes import copied_outputs, may_alias, optimize, overlaps, overwriting
from spmd.torch_internals import AutoDispatchBelowAutograd

__all__ = ["LinkedProgram"]


class LinkedProgram:
    """A program, ready to run on one worker. One thread at a time.

    Args:
        program: the program to run.
        rank: number of this worker, as in the programs' meshes.
        meshes: returns the process groups for a mesh. Called while linking, by all workers in the same order.
        generator: source of random numbers, which all workers have seeded alike and use for nothing else;
            default: PyTorch's own.
        device: device on which it runs; default: the CPU.
        states: seeds ``generator``, and has its states; default: the generator itself.

    Example::

        linked = LinkedProgram(program, rank, meshes)
        outputs = linked.run([weight, rows], [0.1])
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        meshes: Callable[[MeshKey], Groups],
        generator: torch.Generator | None = None,
        device: torch.device | None = None,
        states: CommonGenerator | None = None,
    ) -> None:
        self._program, self._rank, self._meshes = program, rank, meshes
        self._device = device
        self._generator = torch.default_generator if generator is None else generator
        self._states: Any = self._generator if states is None else states
        self._metas: list[Meta | None] = list(program.inputs)
        self._steps = [self._link(index, each) for index, each in enumerate(program.instructions)]
        self._steps += copied_outputs(program, self._steps)
        self._assembled = Assembled(program, self._steps, self._check)
        self._has_run = False

    def run(
        self,
        inputs: list[Tensor],
        scalars: Sequence[float],
        failures: list[InstructionError] | None = None,
    ) -> list[Tensor]:
        """Run it once.

        Args:
            inputs: shards of this worker. The list is emptied, so that they can be freed during the run.
            scalars: numbers of the program.
            failures: collects errors of instructions that only this worker executes: their results are
                replaced by zeros, and execution continues. None: they are raised like others.

        Returns:
            This worker's shards of the program's outputs.

        Raises:
            InstructionError: an instruction has failed. Its results are lost, and so are inputs that are not
                outputs.
        """
        assembled = self._assembled
        with DefaultDtype(self._program.default_dtype):
            try:
                with torch.no_grad(), AutoDispatchBelowAutograd(), self._on_device():
                    outputs = assembled.function(inputs, scalars)
            except Exception as error:
                stopped = assembled.stopped_at(error)
                if stopped is None:
                    raise
                place, values = stopped
                step = assembled.step_at(place)
                failure = InstructionError(step.index, error)
                if failures is None or not step.alone:
                    raise failure from error
                failures.append(failure)
                with torch.no_grad(), AutoDispatchBelowAutograd(), self._on_device():
                    outputs = assembled.finish(place, values, scalars, self._zeros, failures)
        if not self._has_run:
            self._has_run = True
            self._assembled = Assembled(self._program, optimize(self._program, self._steps, self._metas))
            self._steps = []
        return outputs

    def _on_device(self) -> Any:
        """Inside, functions that make tensors make them on the device."""
        return nullcontext() if self._device is None else self._device

    def _check(self, value: int, local: Tensor) -> None:
        """Check in the first run that each shard has the properties of its layout."""
        meta = self._metas[value]
        assert meta is not None
        if local.is_quantized:
            raise NotImplementedError("tensors on spmd:0 cannot be quantized: do this on the CPU")
        shape = local_shape(meta, self._rank)
        if tuple(local.shape) != shape or local.dtype != meta.dtype:
            raise RuntimeError(
                f"a rule is wrong: worker {self._rank} has {local.dtype}{list(local.shape)}, where "
                f"{meta.layout} of {meta.dtype}{list(meta.shape)} asks for {list(shape)}"
            )

    def _zeros(self, value: int) -> Tensor:
        """Return the replacement for this worker's shard of a value."""
        meta = self._metas[value]
        assert meta is not None
        return torch.zeros(local_shape(meta, self._rank), dtype=meta.dtype)

    # ---- linking

    def _link(self, index: int, instruction: Instruction) -> LocalCall:
        first = len(self._metas)
        results = tuple(
            None if meta is None else first + place for place, meta in enumerate(instruction.results)
        )
        specials: dict[str, Callable[..., Any]] = {
            SEED: self._seed,
            GET_RNG_STATE: self._states.get_state,
            SET_RNG_STATE: self._states.set_state,
        }
        special = specials.get(instruction.operator)
        if special is not None:
            step = LocalCall(index, special, instruction.args, {}, results, single=True, alone=True)
        elif instruction.operator in (TO_LOCAL, FROM_LOCAL):
            step = self._relabel(index, instruction, results)
        elif instruction.operator == REDISTRIBUTE:
            step = self._redistribute(index, instruction, results)
        else:
            step = self._operation(index, instruction, results)
        self._metas += instruction.results
        return step

    def _seed(self, seed: int) -> None:
        self._states.manual_seed(int(seed))

    def _relabel(self, index: int, instruction: Instruction, results: tuple[int | None, ...]) -> LocalCall:
        (meta,) = instruction.results
        assert meta is not None
        shape = local_shape(meta, self._rank)

        def fit(local: Tensor, _: object = None) -> Tensor:
            inside = tuple(slice(0, size) for size in map(min, local.shape, shape))
            if all(size <= wanted for size, wanted in zip(local.shape, shape, strict=True)):
                fitted = local.new_zeros(shape)
                fitted[inside] = local
                return fitted
            return local[inside].contiguous()

        return LocalCall(index, fit, (instruction.args[0],), {}, results, single=True, alone=True)

    def _redistribute(
        self, index: int, instruction: Instruction, results: tuple[int | None, ...]
    ) -> LocalCall:
        source, target = instruction.args
        meta = self._metas[source.index]
        assert meta is not None
        turned = meta.stride != contiguous_stride(meta.shape)
        moves = [
            (replace(each, turned=turned), self._meshes(each.mesh).get_group(each.axis))
            for each in plan(meta.shape, meta.layout, target, self._rank)
        ]

        def redistribute(local: Tensor) -> Tensor:
            for each, group in moves:
                local = move(local, each, group)
            return local

        step = LocalCall(index, redistribute, (source,), {}, results, single=True, moves=tuple(moves))
        kinds = {each.kind for each, _ in moves}
        if kinds <= {"part"}:  # the others give memory of their own
            step.shared = tuple((result, source.index) for result in results if result is not None)
        step.alone = kinds <= {"slice", "part"}
        return step

    def _operation(self, index: int, instruction: Instruction, results: tuple[int | None, ...]) -> LocalCall:
        op = resolve(instruction.operator)
        kwargs = dict(instruction.kwargs)

        def meta_of(ref: Ref) -> Meta | None:
            return self._metas[ref.index]

        metas, named = pytree.tree_map_only(Ref, meta_of, (instruction.args, kwargs))
        call = OperatorCall(op, metas, named, tensors_of(metas, named))
        if (
            self._device is not None
            and not call.tensors
            and any(each.name == "device" for each in op._schema.arguments)
        ):
            kwargs["device"] = self._device
        asked: list[MeshKey] = []

        def meshes(key: MeshKey) -> Groups:
            asked.append(key)
            return self._meshes(key)

        site = Site(call, instruction.args, kwargs, instruction.results, self._rank, meshes, self._generator)
        rule = LOCAL_RULES.get(op.name())
        local = rule(site) if rule is not None else None
        own = local is None or not asked
        if local is None:
            local = with_generator(site) if is_random(op) else Local(op, instruction.args, kwargs)
        returns = op._schema.returns
        single = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
        step = LocalCall(index, local.function, local.args, local.kwargs, results, single=single)
        step.over, step.written = local.over, local.written
        step.alone = not asked and not is_random(op)
        is_view = local.is_view
        if isinstance(local.function, OpOverload):
            step.function = local.function._op
            step.over, step.written = overwriting(local.function)
            is_view = may_alias(local.function)
            step.overlaps = overlaps(local.function)
        if not single and len(returns) > 1 and any(isinstance(each.type, torch.ListType) for each in returns):
            step.function = functools.partial(_flattened, step.function)
        for result, ref in local.returned:
            number = results[result]
            if number is not None:
                step.shared += ((number, ref.index),)
        if is_view:
            step.shared = tuple(
                (result, read) for result in results if result is not None for read in step.reads()
            )
        if own and not is_random(op) and (zeros := zeros_instead(site, step.single)) is not None:
            step.function, step.over, step.written = zeros, None, ()
        return step


def _flattened(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    return pytree.tree_leaves(function(*args, **kwargs))


@functools.cache
def resolve(name: str) -> Any:
    """Return the overload with a name such as ``aten::add.Tensor``.

    Raises:
        LookupError: it is not registered in this process.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace in _REGISTERED_BY:  # which PyTorch imports when it is first used
        importlib.import_module(_REGISTERED_BY[namespace])
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError as error:
        raise LookupError(
            f"the operator {name} is not registered on the workers: what registers it must be imported there"
        ) from error


_REGISTERED_BY: Final = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
