"""What the recorder and the session make of a program: what is sent, kept and freed."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rpc.agent.futures import Future
from rpc.errors import WorkerLostError
from spmd.collectives.errors import CollectiveError
from spmd.engine.api import (
    constrain,
    load_local_parts,
    local_parts,
    redistributed,
    uploaded_with,
    value_layout,
)
from spmd.engine.driver import current
from spmd.engine.driver.blocks import cut, holders, put_together
from spmd.engine.driver.recorder import LIMIT
from spmd.engine.driver.session import Session
from spmd.engine.errors import OperationError, SpmdError
from spmd.engine.program.metas import Spec, infer
from spmd.engine.program.program import REPLICATED, Layout, MeshKey
from spmd.engine.program.repetition import Repetition
from spmd.engine.program.step_messages import Answer, EngineStep, Failure
from tests.support.effort import PROFILE, examples
from tests.support.interrupting import interrupted
from tests.support.spmd_session import InlinePort, inline_session

pytestmark = pytest.mark.logical_device


@pytest.fixture
def both() -> Iterator[tuple[Session, InlinePort]]:
    with inline_session() as made:
        yield made


def there(*numbers: float) -> Tensor:
    return torch.tensor(numbers).to(current.DEVICE)


def test_what_is_computed_on_the_driver_conjugates_as_elsewhere(both: tuple[Session, InlinePort]) -> None:
    points, values = torch.randn(3, 5, 2, dtype=torch.complex64), torch.randn(3, 5, 2, dtype=torch.complex64)
    here = torch.linalg.lstsq(points, values, driver="gelss")
    found = torch.linalg.lstsq(points.to(current.DEVICE), values.to(current.DEVICE), driver="gelss")
    torch.testing.assert_close(found.residuals.cpu(), here.residuals)


def test_nothing_runs_before_somebody_asks(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = there(1, 2) * 3
    assert not port.steps
    session.sync()
    assert len(port.steps) == 1
    assert x.tolist() == [3, 6]


def test_a_long_recording_goes_out_by_itself(both: tuple[Session, InlinePort]) -> None:
    _, port = both
    x = there(1)
    for _ in range(LIMIT + 1):
        x = x + 1
    assert len(port.steps) == 1


def test_what_nobody_uses_is_not_done(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = there(1, 2)
    _ = (x + 1).exp()
    kept = x * 2
    del _
    session.sync()
    definition = port.steps[0].definition
    assert definition is not None
    assert [each.operator for each in definition.instructions] == ["aten::mul.Tensor"]
    assert kept.tolist() == [2, 4]


def test_random_numbers_are_drawn_even_if_nobody_uses_them(both: tuple[Session, InlinePort]) -> None:
    torch.manual_seed(5)
    torch.rand(3, device=current.DEVICE)
    second = torch.rand(3, device=current.DEVICE).cpu()
    torch.manual_seed(5)
    torch.rand(3)
    assert torch.equal(second, torch.rand(3))


def test_steps_of_a_training_loop_are_one_program_sent_once(
    both: tuple[Session, InlinePort],
) -> None:
    _, port = both
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(current.DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sent = []
    for step in range(6):
        port.steps.clear()
        batch = torch.full((3, 4), float(step)).to(current.DEVICE)
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        current.engine().recorder.flush()
        (sent_now,) = port.steps
        sent.append(sent_now)
    assert all(each.program == sent[2].program and each.definition is None for each in sent[3:])
    assert all(len(pickle.dumps(replace(each, uploads=()))) < 300 for each in sent[4:])


def test_workers_free_what_the_user_has_freed(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x, y = there(1, 2), there(3)
    z = x + y
    session.sync()
    assert len(port.engine.values) == 3
    del y
    x = x + z  # the old x dies, and is used up by the run
    session.sync()
    assert len(port.engine.values) == 2
    assert x.tolist() == [5, 7]
    del x, z
    there(0).add(1).item()
    assert not port.engine.values.keys() - {max(port.engine.values, default=0)}


def test_what_was_freed_goes_at_a_sync_with_nothing_else_to_do(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = there(1, 2) + 1
    session.sync()
    del x
    session.sync()
    assert not port.engine.values
    session.sync()
    assert len(port.steps) == 2


def test_what_was_freed_goes_before_more_is_made(both: tuple[Session, InlinePort]) -> None:
    events = []

    class Noted(dict[int, Tensor]):
        def pop(self, number: int, *default: Any) -> Any:
            events.append("gone")
            return super().pop(number, *default)

        def __setitem__(self, number: int, value: Tensor) -> None:
            events.append("made")
            super().__setitem__(number, value)

    session, port = both
    x = there(1, 2)
    gradient = x * 2
    session.sync()
    port.engine.values = Noted(port.engine.values)
    del gradient
    gradient = x * 3
    session.sync()
    assert events == ["gone", "made"]
    assert gradient.tolist() == [3, 6]


def test_the_default_dtype_is_that_of_the_driver(both: tuple[Session, InlinePort]) -> None:
    before = torch.zeros(1, device=current.DEVICE)
    torch.set_default_dtype(torch.float64)
    try:
        made = torch.zeros(1, device=current.DEVICE)
        divided = torch.arange(3, device=current.DEVICE) / 2
    finally:
        torch.set_default_dtype(torch.float32)
    after = torch.zeros(1, device=current.DEVICE)
    dtypes = [each.cpu().dtype for each in (before, made, divided, after)]
    assert dtypes == [torch.float32, torch.float64, torch.float64, torch.float32]


def test_constants_of_different_kinds_are_not_taken_for_each_other(both: tuple[Session, InlinePort]) -> None:
    made = [torch.full((1,), each, device=current.DEVICE) for each in (True, 1, 1.0, 1 + 0j)]
    assert [each.dtype for each in made] == [torch.bool, torch.int64, torch.float32, torch.complex64]


def test_what_is_not_used_is_never_uploaded(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = there(1, 2)
    assert x.tolist() == [1, 2]
    session.sync()
    assert not port.engine.values


def test_uploads_are_copies(both: tuple[Session, InlinePort]) -> None:
    given = torch.ones(2)
    x = given.to(current.DEVICE)
    given.zero_()
    assert (x + 0).tolist() == [1, 1]


def test_what_does_not_depend_on_a_failure_is_computed(both: tuple[Session, InlinePort]) -> None:
    session, _ = both
    for _ in range(3):  # as linked, and as rewritten by the passes
        x, wrong = there(1, 2), torch.tensor([5]).to(current.DEVICE)
        session.sync()
        before = x + 1
        lost = (x * 2).index_select(0, wrong)
        inverse = torch.linalg.inv(lost.expand(2, 2) * 0.0)  # fails as well, for that reason
        after = (before * 3).add_(x)
        x[0] = 7
        with pytest.raises(OperationError, match="index_select"):
            session.sync()
        session.sync()
        for each in (lost, inverse):
            with pytest.raises(OperationError, match=r"never computed: .*index_select"):
                each.cpu()
        assert after.tolist() == [7, 11]
        assert x.tolist() == [7, 2]


def test_what_is_under_way_when_something_fails_depends_on_it_or_not(
    both: tuple[Session, InlinePort],
) -> None:
    session, _ = both
    x, wrong = there(1, 2), torch.tensor([5]).to(current.DEVICE)
    lost, kept = x.index_select(0, wrong), x + 1
    session.recorder.flush()
    lost_too, kept_too = lost + kept, kept + 1
    session.recorder.flush()
    with pytest.raises(OperationError):
        session.sync()
    assert kept_too.tolist() == [3, 4]
    with pytest.raises(OperationError, match="never computed"):
        lost_too.cpu()


def test_the_answer_of_a_step_is_not_lost_when_the_wait_for_it_is_interrupted(
    both: tuple[Session, InlinePort], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, port = both
    send, first = port.send, Future[Any]()

    def send_first(step: EngineStep) -> Any:
        monkeypatch.setattr(port, "send", send)
        return first

    monkeypatch.setattr(port, "send", send_first)
    x = there(1) * 2
    interrupted(session.sync)
    first.set_result(Answer((), (Failure(0, ValueError("it does not fit"), ends=False),)))
    with pytest.raises(OperationError, match="it does not fit"):
        session.sync()
    del x


def test_workers_make_new_groups_when_a_collective_has_failed_on_all(
    both: tuple[Session, InlinePort], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, port = both
    generations: list[int] = []

    def failed(step: EngineStep) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(Answer((), (Failure(0, CollectiveError("all_gather: it does not fit")),)))
        return future

    def regroup(generation: int) -> Any:
        generations.append(generation)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(port, "send", failed)
    monkeypatch.setattr(port, "regroup", regroup)
    x = there(1) * 2
    with pytest.raises(OperationError, match="it does not fit"):
        session.sync()
    assert generations == [1]
    del x


def test_nothing_more_is_run_when_workers_could_not_make_new_groups(
    both: tuple[Session, InlinePort], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, port = both
    send = port.send

    def failed(step: EngineStep) -> Any:
        monkeypatch.setattr(port, "send", send)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(Answer((), (Failure(0, CollectiveError("all_gather: it does not fit")),)))
        return future

    def regroup(generation: int) -> Any:
        done: Any = torch.futures.Future()
        done.set_exception(WorkerLostError("worker 'inline' is lost"))
        return done

    monkeypatch.setattr(port, "send", failed)
    monkeypatch.setattr(port, "regroup", regroup)
    monkeypatch.setattr(port, "abort", lambda reason: None)
    x = there(1) * 2
    for _ in range(2):
        with pytest.raises(WorkerLostError):
            session.sync()
    with pytest.raises(WorkerLostError):
        (there(1) + 1).tolist()
    del x


def test_errors_in_shapes_are_raised_at_once(both: tuple[Session, InlinePort]) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(2, 3, device=current.DEVICE) @ torch.ones(2, 3, device=current.DEVICE)
    with pytest.raises(RuntimeError):
        torch.ones(2, dtype=torch.int64, device=current.DEVICE).add_(0.5)
    with pytest.raises(RuntimeError):
        torch.ones(2, device=current.DEVICE).add_(torch.ones(3, 2, device=current.DEVICE))


def test_threads_take_turns(both: tuple[Session, InlinePort]) -> None:
    found: dict[int, list[float]] = {}

    def count(number: int) -> None:
        x = there(number)
        for _ in range(50):
            x = x + 1
        found[number] = x.tolist()

    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {number: [number + 50.0] for number in range(4)}


# ---- layouts, as far as one worker has any

ONE = Layout(MeshKey((0,), (1,)), (Shard(0),))


def test_data_is_uploaded_as_it_is_to_lie(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = there(1, 2)
    constrain(x, ONE)
    assert value_layout(x) == ONE
    y = x * 2
    assert value_layout(y) == ONE
    session.sync()
    definition = port.steps[0].definition
    assert definition is not None
    assert definition.inputs[0].layout == ONE
    assert len(definition.instructions) == 1
    assert value_layout(uploaded_with(torch.ones(2), ONE)) == ONE


def test_data_that_is_needed_whole_is_uploaded_once(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = there(1, 2, 4)
    constrain(x, ONE)
    y = x[1:] + x[:-1]
    session.sync()
    definition = port.steps[0].definition
    assert definition is not None
    assert len(definition.inputs) == 1
    assert y.tolist() == [3, 6]


def test_sparse_and_quantized_tensors_are_refused(both: tuple[Session, InlinePort]) -> None:
    session, _ = both
    with pytest.raises(NotImplementedError, match=r"are dense, .* layout torch.sparse_coo: use a dense one"):
        there(1, 0).to_sparse()
    with pytest.raises(NotImplementedError, match="are dense"):
        torch.tensor([1.0, 0]).to_sparse().to(current.DEVICE)
    quantized = torch.quantize_per_tensor(there(1.0, 2.0), 0.1, 0, torch.quint8)
    with pytest.raises(OperationError, match="cannot be quantized"):
        session.sync()
    del quantized


def test_data_is_not_uploaded_as_a_sum_that_is_still_to_be_done(both: tuple[Session, InlinePort]) -> None:
    session, port = both
    x = redistributed(there(1, 2), Layout.of(MeshKey((0,), (1,)), (Partial(),)))
    session.recorder.flush()
    definition = port.steps[0].definition
    assert definition is not None
    assert definition.inputs[0].layout == REPLICATED
    assert value_layout(x).is_partial()


def test_changes_in_place_leave_a_tensor_where_it_lies(both: tuple[Session, InlinePort]) -> None:
    x = there(1, 2)
    constrain(x, ONE)
    x.copy_(torch.tensor([3.0, 4.0]))
    x.add_(there(1, 1))
    assert x.tolist() == [4, 5]
    x[0] = 0
    assert value_layout(x) == ONE
    assert value_layout(there(1)) == REPLICATED


def test_a_sum_that_is_changed_through_a_view_is_not_made_a_sum_again(
    both: tuple[Session, InlinePort],
) -> None:
    x = torch.tensor([[1.0, -2.0]]).to(current.DEVICE)
    constrain(x, Layout(MeshKey((0,), (1,)), (Partial(),)))
    x.t().relu_()
    assert value_layout(x) == REPLICATED


def test_parts_are_fetched_and_loaded(both: tuple[Session, InlinePort]) -> None:
    x = there(1, 2)
    constrain(x, ONE)
    assert [each.tolist() for each in local_parts(x)] == [[1, 2]]
    load_local_parts(x, [torch.tensor([7.0, 8.0])])
    assert x.tolist() == [7, 8]
    with pytest.raises(ValueError, match="worker 0's part"):
        load_local_parts(x, [torch.ones(3)])
    with pytest.raises(ValueError, match="expected 1 parts"):
        load_local_parts(x, [])


# ---- pure parts


@settings(PROFILE, max_examples=examples(60))
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.lists(st.one_of(st.floats(), st.integers(-2, 2), st.booleans()), max_size=4),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["moving", "fixed", "mixed"]),
)
def test_both_ends_guess_the_same_ids_and_numbers(runs: list[tuple[int, list[float]]], kind: str) -> None:
    sender, receiver = Repetition(), Repetition()
    base = 10
    for shift, numbers in runs:
        base += shift
        ids = {"moving": (base - 1, base), "fixed": (3, 4), "mixed": (3, base)}[kind]
        packed = pickle.loads(pickle.dumps(sender.pack(base, ids, tuple(numbers))))
        found_ids, found_numbers = receiver.unpack(base, packed)
        assert found_ids == ids
        assert pickle.dumps(found_numbers) == pickle.dumps(list(numbers))


@settings(PROFILE, max_examples=examples(100))
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    mesh=st.sampled_from([(4,), (2, 2), (4, 2), (2, 1, 3)]),
    dims=st.lists(st.one_of(st.none(), st.integers(0, 2)), min_size=3, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_a_tensor_is_cut_and_put_together(
    shape: list[int], mesh: tuple[int, ...], dims: list[int | None], order: Random
) -> None:
    workers = torch.Size(mesh).numel()
    devices = list(range(workers))
    order.shuffle(devices)
    placements: list[Placement] = [
        Replicate() if dim is None or dim >= len(shape) else Shard(dim) for dim in dims[: len(mesh)]
    ]
    layout = Layout.of(MeshKey(tuple(devices), mesh), tuple(placements))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = cut(whole, layout, workers)
    asked = holders(layout, workers)
    assert sum(parts[worker].numel() for worker in asked) == whole.numel()
    found = put_together(shape, whole.dtype, layout, {worker: parts[worker] for worker in asked})
    assert torch.equal(found, whole)


def test_a_loop_that_never_waits_soon_sends_programs_that_workers_have(
    both: tuple[Session, InlinePort],
) -> None:
    _, port = both
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)]).to(current.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, foreach=False)
    for _ in range(40):
        model(torch.ones(3, 4).to(current.DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(port.steps) > 4
    assert all(each.definition is None for each in port.steps[3:])


def test_wrong_arguments_are_told_of_by_the_error_alone() -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[assignment, method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        two, three = (Spec.of((size,), (1,), torch.float32) for size in (2, 3))
        with pytest.raises(RuntimeError, match="broadcast"):
            infer(torch.ops.aten.add.Tensor, (two, three), {})
    finally:
        log.removeHandler(handler)
    assert not said


@pytest.mark.usefixtures("both")
def test_collectives_in_groups_of_several_ranks_are_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(SpmdError, match="say with spmd"):
            dist.all_reduce(there(1.0))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("both")
def test_pinning_is_refused() -> None:
    with pytest.raises(RuntimeError, match="leave out pin_memory"):
        there(1.0).pin_memory()
