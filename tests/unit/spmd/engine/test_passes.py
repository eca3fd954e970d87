"""What passes do to a linked program: nobody sees that memory is used again, or when reductions run."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from spmd.engine.program.program import (
    GET_RNG_STATE,
    REDISTRIBUTE,
    REPLICATED,
    SEED,
    SET_RNG_STATE,
    Instruction,
    Layout,
    MeshKey,
    Meta,
    Program,
    Ref,
    Scalar,
)
from spmd.engine.program.redistribution import take_shard
from spmd.engine.worker.interpreter import LinkedProgram
from spmd.engine.worker.local_calls import InstructionError
from tests.unit.spmd.collectives.ranks import in_threads
from tests.unit.spmd.engine.recorded import Recorder, Value, World, meta_of

aten: Any = torch.ops.aten
LINE: Final = MeshKey((0, 1), (2,))


def link(program: Program) -> LinkedProgram:
    """For a worker that needs no others."""
    return LinkedProgram(program, 0, lambda key: pytest.fail(f"{key} is asked for"))


def run_twice(recorder: Recorder, outputs: Sequence[Value]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of a second run, which is the first with passes."""
    linked = link(recorder.program(outputs))
    linked.run([each.whole.clone() for each in recorder.inputs], ())
    inputs = [each.whole.clone() for each in recorder.inputs]
    results = linked.run(list(inputs), ())
    for result, value in zip(results, outputs, strict=True):
        torch.testing.assert_close(result, value.whole)
    return inputs, results


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_an_input_that_is_no_output_is_overwritten() -> None:
    recorder = Recorder()
    weight, grad = recorder.input(torch.randn(4)), recorder.input(torch.randn(4))
    new = recorder.op(aten.add.Tensor, weight, grad, alpha=-0.1)
    (before, _), (after,) = run_twice(recorder, [new])
    assert memory(after) == memory(before)


def test_an_input_that_is_an_output_stays() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(4))
    new = recorder.op(aten.relu.default, x)
    (before,), (kept, after) = run_twice(recorder, [x, new])
    assert memory(after) != memory(before) == memory(kept)


def test_what_is_read_later_stays() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(4))
    y = recorder.op(aten.exp.default, x)
    run_twice(recorder, [recorder.op(aten.mul.Tensor, y, x)])


@pytest.mark.parametrize("view", [aten.t.default, aten.detach.default])
def test_what_is_read_later_through_a_view_stays(view: Any) -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3, 3))
    seen = recorder.op(view, x)
    y = recorder.op(aten.exp.default, x)
    run_twice(recorder, [recorder.op(aten.add.Tensor, y, seen)])


def test_a_view_is_not_written_while_its_base_is_read_later() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3, 3))
    first = recorder.op(aten.neg.default, recorder.op(aten.select.int, x, 0, 0))
    run_twice(recorder, [recorder.op(aten.add.Tensor, x, first)])


def test_an_argument_that_is_read_at_other_places_is_not_overwritten() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3, 3))
    run_twice(recorder, [recorder.op(aten.add.Tensor, x, recorder.op(aten.t.default, x))])


def test_what_has_elements_twice_is_not_overwritten() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(1, 3))
    wide = recorder.op(aten.expand.default, x, [4, 3])
    turned = recorder.op(aten.t.default, wide)
    run_twice(recorder, [recorder.op(aten.neg.default, turned)])


def test_a_smaller_or_other_result_is_not_written_over() -> None:
    recorder = Recorder()
    x, y = recorder.input(torch.randn(3)), recorder.input(torch.randn(2, 3))
    wide = recorder.op(aten.add.Tensor, x, y)
    run_twice(recorder, [wide, recorder.op(aten.eq.Scalar, recorder.op(aten.exp.default, wide), 1.0)])


def test_a_result_is_not_written_over_a_part_whose_rows_are_apart() -> None:
    recorder = Recorder()
    both, rest = recorder.input(torch.randn(2, 8, 4)), recorder.input(torch.randn(2, 4, 4))
    x, weight = recorder.input(torch.randn(2, 4, 4)), recorder.input(torch.randn(4))
    mean, inverse = recorder.input(torch.randn(2, 2)), recorder.input(torch.rand(2, 2))
    grad = recorder.op(aten.add.Tensor, recorder.op(aten.narrow.default, both, 1, 0, 4), rest)
    # The kernel reads its gradient as contiguous, as callers of this operator make sure that it is.
    args: Any = (grad, x, mean, inverse, weight, 2, 4, 4, 2, [True, True, True])
    run_twice(recorder, list(recorder.op(aten.native_group_norm_backward.default, *args)))


def test_outputs_have_memory_of_their_own() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(2, 3))
    y = recorder.op(aten.exp.default, x)
    views = [recorder.op(aten.t.default, y), recorder.op(aten.view.default, y, [6])]
    wide = recorder.op(aten.expand.default, recorder.op(aten.neg.default, x), [4, 2, 3])
    (before,), results = run_twice(recorder, [x, y, *views, wide, recorder.op(aten.detach.default, x)])
    assert memory(results[0]) == memory(before)
    assert len({memory(each) for each in results}) == len(results)
    assert 0 not in results[4].stride()


@pytest.mark.parametrize("operator", [REDISTRIBUTE, "aten::uniform"])
def test_a_shard_of_rows_does_not_keep_the_whole(operator: str) -> None:
    cut = Layout(LINE, (Shard(0),))
    whole, shard = Meta((6, 3), (3, 1), torch.float32), Meta((6, 3), (3, 1), torch.float32, cut)
    args, given = ((Ref(0), cut), whole) if operator == REDISTRIBUTE else ((Ref(0),), shard)
    program = Program((given,), (Instruction(operator, args, (), (shard,)),), (1,))
    world = World()
    linked = LinkedProgram(program, 0, lambda key: world.mesh(key, 0))
    (part,) = linked.run([torch.rand(3 if given is shard else 6, 3)], ())
    assert part.shape == (3, 3)
    assert part.untyped_storage().nbytes() == part.nbytes


def test_optimizers_on_lists_write_over_their_state() -> None:
    recorder = Recorder()
    weights = [recorder.input(torch.randn(3)), recorder.input(torch.randn(2, 2))]
    grads = [recorder.input(each.whole) for each in weights]
    averages = [recorder.input(torch.zeros_like(each.whole)) for each in weights]
    squares = [recorder.input(torch.zeros_like(each.whole)) for each in weights]
    steps = [recorder.input(torch.ones(())) for _ in weights]
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    args: Any = (weights, grads, averages, squares, [], steps)
    results = recorder.op(aten._fused_adam.default, *args, **settings, **flags)
    decayed = recorder.op(aten._foreach_mul.Scalar, results[:2], 0.9)
    before, after = run_twice(recorder, [*decayed, *results[2:]])
    assert [memory(each) for each in after] == [memory(each) for each in before[: len(after)]]


def test_two_lists_in_one_memory_are_not_overwritten() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3))
    parts = [x, recorder.op(aten.detach.default, x)]
    run_twice(recorder, recorder.op(aten._foreach_mul.Scalar, parts, 0.9))


@pytest.mark.parametrize("op", [aten._foreach_add.List, aten._foreach_mul.Tensor])
def test_a_list_is_not_overwritten_while_another_index_reads_it(op: Any) -> None:
    recorder = Recorder()
    x, y = recorder.input(torch.randn(())), recorder.input(torch.randn(()))
    other = [y, x] if op is aten._foreach_add.List else x
    run_twice(recorder, recorder.op(op, [x, y], other))


# ---- reductions


class WatchedGroup:
    """A process group that notes what it is called for.

    Args:
        late: it does nothing until it is waited for, as one that runs beside may do.
    """

    def __init__(self, group: Any, calls: list[tuple[str, int]], late: bool) -> None:
        self._group, self._calls, self._late = group, calls, late

    def size(self) -> int:
        return int(self._group.size())

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            tensor = args[0][0]
            self._calls.append((name, tensor.numel() if isinstance(tensor, Tensor) else 0))
            return (
                SimpleNamespace(wait=lambda: wait(*args)) if self._late else getattr(self._group, name)(*args)
            )

        def wait(*args: Any) -> None:
            self._calls.append(("arrives", 0))
            getattr(self._group, name)(*args)

        return call


def watched(
    program: Program, inputs: Sequence[Tensor], layout: Layout = REPLICATED, late: bool = False
) -> tuple[list[tuple[str, int]], list[list[Tensor]]]:
    """What a worker's groups do in a second run, and all workers' results."""
    world = World()
    calls: list[list[tuple[str, int]]] = [[], []]

    def body(rank: int) -> list[Tensor]:
        group = WatchedGroup(world.mesh(LINE, rank).get_group(0), calls[rank], late)
        linked = LinkedProgram(program, rank, lambda key: SimpleNamespace(get_group=lambda axis: group))
        for _ in range(2):
            calls[rank].clear()
            results = linked.run([take_shard(each, layout, rank).clone() for each in inputs], ())
        return results

    results = in_threads(2, body)
    assert calls[0] == calls[1]
    return calls[0], results


def summed(*sizes: int) -> Program:
    """Sums of values that are made one after the other, which are all used at the end."""
    partial = Layout(LINE, (Partial(),))
    instructions = []
    metas = [Meta((size,), (1,), torch.float32, partial) for size in sizes]
    whole = [Meta((size,), (1,), torch.float32) for size in sizes]
    count = len(sizes)
    for place, meta in enumerate(metas):
        instructions.append(Instruction("aten::neg", (Ref(place),), (), (meta,)))
    for place, meta in enumerate(whole):
        instructions.append(Instruction(REDISTRIBUTE, (Ref(count + place), REPLICATED), (), (meta,)))
    for place, meta in enumerate(whole):
        instructions.append(Instruction("aten::exp", (Ref(2 * count + place),), (), (meta,)))
    return Program(tuple(metas), tuple(instructions), tuple(range(3 * count, 4 * count)))


def test_small_reductions_are_done_together() -> None:
    inputs = [torch.randn(3), torch.randn(5)]
    calls, results = watched(summed(3, 5), inputs)
    assert calls == [("allreduce", 8)]
    for each, given in zip(results[0], inputs, strict=True):
        torch.testing.assert_close(each, (-2 * given).exp())


def test_large_reductions_are_done_alone() -> None:
    large = (1 << 18) + 1
    inputs = [torch.randn(3), torch.randn(large)]
    calls, results = watched(summed(3, large), inputs)
    assert sorted(calls) == [("allreduce", 3), ("allreduce", large)]
    for each, given in zip(results[1], inputs, strict=True):
        torch.testing.assert_close(each, (-2 * given).exp())


def test_what_is_reduced_stays_for_others_who_read_it() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(4, 2), Layout(LINE, (Shard(0),)))
    total = recorder.op(aten.sum.dim_IntList, x, [0])
    whole = recorder.redistribute(total, REPLICATED)
    still = recorder.redistribute(recorder.op(aten.neg.default, total), REPLICATED)
    recorder.check([whole, still])


def test_scattered_sums_are_done_together() -> None:
    partial, rows = Layout(LINE, (Partial(),)), Layout(LINE, (Shard(0),))
    columns = Layout(LINE, (Shard(1),))
    meta = Meta((4, 2), (2, 1), torch.float32, partial)
    scattered = [Meta((4, 2), (2, 1), torch.float32, layout) for layout in (rows, columns)]
    instructions = [Instruction("aten::neg", (Ref(place),), (), (meta,)) for place in range(2)]
    for place, each in enumerate(scattered):
        instructions.append(Instruction(REDISTRIBUTE, (Ref(2 + place), each.layout), (), (each,)))
    for place, each in enumerate(scattered):
        instructions.append(Instruction("aten::relu", (Ref(4 + place),), (), (each,)))
    inputs = [-torch.rand(4, 2), -torch.rand(4, 2)]
    calls, results = watched(Program((meta, meta), tuple(instructions), (6, 7)), inputs)
    assert [name for name, _ in calls] == ["reduce_scatter"]
    for rank in range(2):
        torch.testing.assert_close(results[rank][0], -2 * inputs[0].chunk(2)[rank])
        torch.testing.assert_close(results[rank][1], -2 * inputs[1].chunk(2, 1)[rank])


def test_what_is_being_scattered_is_not_overwritten() -> None:
    partial, rows = Layout(LINE, (Partial(),)), Layout(LINE, (Shard(0),))
    large = (1 << 18) + 2
    meta = Meta((large,), (1,), torch.float32, partial)
    shard = Meta((large,), (1,), torch.float32, rows)
    instructions = (
        Instruction("aten::mul.Scalar", (Ref(0), 2.0), (), (meta,)),
        Instruction(REDISTRIBUTE, (Ref(1), rows), (), (shard,)),
        Instruction("aten::mul.Scalar", (Ref(1), 5.0), (), (meta,)),
        Instruction("aten::relu", (Ref(2),), (), (shard,)),
    )
    given = torch.rand(large)
    _, results = watched(Program((meta,), instructions, (3, 4)), [given], late=True)
    for rank, (other, scattered) in enumerate(results):
        torch.testing.assert_close(other, given * 10)
        torch.testing.assert_close(scattered, given.chunk(2)[rank] * 4)


def test_what_is_gathered_next_comes_along() -> None:
    rows, columns = Layout(LINE, (Shard(0),)), Layout(LINE, (Shard(1),))
    metas = [Meta((6, 2), (2, 1), torch.float32, rows), Meta((5, 3), (3, 1), torch.float32, rows)]
    turned = Meta((3, 5), (1, 3), torch.float32, columns)
    whole = [Meta((6, 2), (2, 1), torch.float32), Meta((3, 5), (5, 1), torch.float32)]
    instructions = (
        Instruction(REDISTRIBUTE, (Ref(0), REPLICATED), (), (whole[0],)),
        Instruction("aten::exp", (Ref(2),), (), (whole[0],)),
        Instruction("aten::t", (Ref(1),), (), (turned,)),
        Instruction(REDISTRIBUTE, (Ref(4), REPLICATED), (), (whole[1],)),
        Instruction("aten::exp", (Ref(5),), (), (whole[1],)),
    )
    x, y = torch.randn(6, 2), torch.randn(5, 3)
    calls, results = watched(Program(tuple(metas), instructions, (3, 6)), [x, y], rows)
    for first, second in results:
        torch.testing.assert_close(first, x.exp())
        torch.testing.assert_close(second, y.t().exp())
    assert [name for name, _ in calls] == ["allgather"]


def test_what_is_gathered_again_soon_comes_once_and_stays_till_then() -> None:
    rows = Layout(LINE, (Shard(0),))
    shard, whole = Meta((6, 2), (2, 1), torch.float32, rows), Meta((6, 2), (2, 1), torch.float32)
    instructions = (
        Instruction(REDISTRIBUTE, (Ref(0), REPLICATED), (), (whole,)),
        Instruction("aten::exp", (Ref(1),), (), (whole,)),
        Instruction(REDISTRIBUTE, (Ref(0), REPLICATED), (), (whole,)),
        Instruction("aten::neg", (Ref(3),), (), (whole,)),
    )
    x = torch.randn(6, 2)
    calls, results = watched(Program((shard,), instructions, (2, 4)), [x], rows)
    assert [name for name, _ in calls] == ["allgather"]
    for first, second in results:
        torch.testing.assert_close(first, x.exp())
        torch.testing.assert_close(second, -x)


def test_what_is_being_gathered_is_not_overwritten() -> None:
    rows, large = Layout(LINE, (Shard(0),)), (1 << 20) + 2
    shard, whole = Meta((large,), (1,), torch.float32, rows), Meta((large,), (1,), torch.float32)
    instructions = (
        Instruction(REDISTRIBUTE, (Ref(0), REPLICATED), (), (whole,)),
        Instruction("aten::neg", (Ref(1),), (), (shard,)),  # by then, it is on its way
        Instruction(REDISTRIBUTE, (Ref(1), REPLICATED), (), (whole,)),
        Instruction("aten::exp", (Ref(4),), (), (whole,)),
        Instruction("aten::relu", (Ref(2),), (), (whole,)),
    )
    x, y = torch.rand(large), torch.rand(large)
    calls, results = watched(Program((shard, shard), instructions, (3, 5, 6)), [x, y], rows, late=True)
    for rank, (turned, second, first) in enumerate(results):
        torch.testing.assert_close(turned, -take_shard(y, rows, rank))
        torch.testing.assert_close(second, y.exp())
        torch.testing.assert_close(first, x)
    # the second begins when the first has come
    assert [name for name, _ in calls] == ["allgather", "arrives"] * 2


# ---- numbers, errors, the common generator


def test_numbers_are_arguments() -> None:
    meta = meta_of(torch.zeros(2))
    instruction = Instruction("aten::mul.Scalar", (Ref(0), Scalar(0)), (), (meta,))
    linked = link(Program((meta,), (instruction,), (1,)))
    for number in (2.0, 3.0):
        (result,) = linked.run([torch.ones(2)], [number])
        assert result.tolist() == [number, number]


def test_an_error_tells_which_instruction_has_failed() -> None:
    metas = meta_of(torch.zeros(3, 2)), meta_of(torch.zeros(1, dtype=torch.int64))
    instructions = (
        Instruction("aten::neg", (Ref(0),), (), (metas[0],)),
        Instruction("aten::index_select", (Ref(2), 0, Ref(1)), (), (meta_of(torch.zeros(1, 2)),)),
    )
    linked = link(Program(metas, instructions, (3,)))
    for _ in range(2):
        with pytest.raises(InstructionError, match="index out of range") as raised:
            linked.run([torch.zeros(3, 2), torch.tensor([7])], ())
        assert raised.value.index == 1
        linked.run([torch.zeros(3, 2), torch.tensor([0])], ())


def test_the_common_generator_is_seeded_and_its_state_kept() -> None:
    state = meta_of(torch.get_rng_state())
    drawn = meta_of(torch.zeros(3))
    instructions = (
        Instruction(SEED, (7,)),
        Instruction(GET_RNG_STATE, (), (), (state,)),
        Instruction("aten::randn", ([3],), (), (drawn,)),
        Instruction(SET_RNG_STATE, (Ref(0),)),
        Instruction("aten::randn", ([3],), (), (drawn,)),
    )
    first, again = link(Program((), instructions, (1, 2))).run([], ())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        expected = torch.randn(3)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(again, expected)
