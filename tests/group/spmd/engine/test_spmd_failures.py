"""What goes wrong in SPMD mode, and what is said about it."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import rpc
import spmd
from rpc.errors import SerializationError, WorkerLostError
from rpc.runtime import notices
from spmd.engine.api import constrain, value_layout
from spmd.engine.driver import start
from spmd.engine.errors import (
    AlreadyInSpmdModeError,
    NotInSpmdModeError,
    OperationError,
    ReshardingError,
    SpmdError,
)
from spmd.engine.program.program import Layout, MeshKey
from spmd.engine.worker import worker_process
from tests.support.serving import in_processes, in_standing_group
from tests.support.workers import RunWorkers, Worker

ROWS = Layout(MeshKey((0, 1), (2,)), (Shard(0),))


def there(data: Any, layout: Layout | None = None) -> Tensor:
    """A tensor on the device."""
    tensor = torch.tensor(data).to(spmd.device())
    if layout is not None:
        constrain(tensor, layout)
    return tensor


@in_standing_group(3)
def test_a_failed_operation_is_raised_with_its_line_and_shapes() -> None:
    spmd.use_spmd()
    table, wrong = there([1.0, 2.0, 3.0]), there([7])
    spmd.sync()
    found = table[wrong]
    dependent = found * 2
    with pytest.raises(OperationError) as raised:
        spmd.sync()
    assert isinstance(raised.value.__cause__, IndexError)
    assert "test_spmd_failures.py" in raised.value.where
    assert "aten::index.Tensor(float32[3], [int64[1]])" in str(raised.value)
    with pytest.raises(OperationError, match="never computed"):
        dependent.cpu()
    with pytest.raises(OperationError, match="never computed"):
        dependent + 1
    assert (table * 2).tolist() == [2.0, 4.0, 6.0]  # the mode goes on
    spmd.shutdown()


@in_standing_group(3)
def test_what_is_done_only_for_what_it_raises_is_done() -> None:
    spmd.use_spmd()
    for call in (torch.linalg.cholesky, torch.linalg.inv):
        factor = call(there([[0.0, 0.0], [0.0, 0.0]]))
        with pytest.raises(OperationError, match="could not be completed"):
            factor.cpu()
    torch._assert_async(there(0.0))
    with pytest.raises(OperationError, match="Expected Tensor with single nonzero value"):
        spmd.sync()
    assert torch.linalg.cholesky(there([[4.0]])).tolist() == [[2.0]]
    spmd.shutdown()


@in_standing_group(3)
def test_a_worker_that_fails_alone_does_not_leave_the_others_waiting() -> None:
    spmd.use_spmd()
    ten = there([1.0, 2.0, 3.0, 4.0], ROWS)
    for _ in range(3):
        total = there([1.0, 2.0, 3.0])[there([0, 1, 2, 9], ROWS)].sum()
        other = (ten * 2).sum()
        with pytest.raises(OperationError, match="index 9 is out of bounds"):
            total.item()
        assert other.item() == 20.0  # what does not depend on it is there, though it was made together
        ten.add_(0.0)
    assert ten.sum().item() == 10.0
    spmd.shutdown()


@in_standing_group(3)
def test_after_a_program_that_could_not_go_on_the_mode_goes_on() -> None:
    spmd.use_spmd()
    kept = there([1.0, 2.0, 3.0, 4.0], ROWS)
    spmd.sync()
    odd = there([[1.0, 2.0], [3.0, float("nan")]], ROWS)
    drawn = torch.multinomial(odd, 1)  # random numbers: a worker that fails alone is behind the others
    with pytest.raises(OperationError, match="multinomial"):
        spmd.sync()
    with pytest.raises(OperationError, match="never computed"):
        drawn.cpu()
    assert (kept * 2).sum().item() == 20.0
    spmd.shutdown()


def lose_a_worker(worker: Worker) -> list[tuple[str, str]]:
    """The text of the error when the second worker has been killed."""
    worker.join()
    spmd.use_spmd()
    x = there([1.0, 2.0], ROWS)
    spmd.sync()
    worker.report("ready")
    worker.wait_for("killed")
    found = []
    for use in (lambda: x.sum().item(), spmd.sync):
        with pytest.raises(WorkerLostError) as raised:
            use()
        found.append((raised.value.worker, str(raised.value)))
    spmd.shutdown()
    rpc.shutdown(graceful=False)
    return found


def serve(worker: Worker) -> None:
    """Until the others are gone."""
    worker.join()
    rpc.shutdown()


def test_a_dead_worker_is_named_with_the_step_that_it_did_not_answer(run_workers: RunWorkers) -> None:
    workers = run_workers.start([lose_a_worker, serve, serve])
    workers[0].wait_for("ready")
    workers[2].kill()
    workers[0].tell("killed")
    (first, said), again = workers[0].result()
    assert first == "worker2"
    assert again == (first, said)
    assert re.match(r"worker 'worker2' is gone: .*\. It has not answered step \d+, ", said)
    assert f"{__file__}:" in said
    assert "in <lambda>" in said
    assert "RRef" not in said


def current_mode() -> Any:
    return start._current()


@pytest.mark.parametrize("number", [0, 1])
@in_standing_group(3)
def test_after_a_step_that_a_worker_was_not_sent_the_mode_can_be_left_and_begun_again(number: int) -> None:
    spmd.use_spmd()
    x = there([1.0, 2.0], ROWS)
    spmd.sync()
    mode = current_mode()
    with mock.patch.object(mode.ports[number], "send", side_effect=SerializationError("not sent")):
        y = x * 2
        mode.session.recorder.flush()
    for _ in range(2):  # sent before the driver knows
        y = y + 1
        mode.session.recorder.flush()
    for _ in range(2):
        with pytest.raises(SerializationError, match="not sent"):
            spmd.sync()
    spmd.shutdown()
    spmd.use_spmd()
    assert there([1.0, 2.0], ROWS).sum().item() == 3.0
    spmd.shutdown()


def begin_without_a_worker(worker: Worker) -> str:
    worker.join()
    with pytest.raises(WorkerLostError) as raised:
        spmd.use_spmd()
    assert raised.value.worker == "worker2"
    rpc.shutdown(graceful=False)
    return str(raised.value)


def die_when_the_mode_begins(worker: Worker) -> None:
    def die(*_: object) -> None:
        worker.die()

    worker.join()
    with mock.patch("spmd.engine.worker.served_worker.make", die):
        rpc.shutdown()


def test_a_worker_that_dies_while_the_mode_begins_is_named(run_workers: RunWorkers) -> None:
    workers = run_workers.start([begin_without_a_worker, serve, die_when_the_mode_begins])
    said = workers[0].result()
    assert said.startswith("SPMD mode could not begin: worker 'worker2' is gone: ")
    assert "make" not in said


@in_standing_group(3)
def test_a_second_use_spmd_is_refused_until_shutdown() -> None:
    assert not spmd.is_spmd()
    with pytest.raises(NotInSpmdModeError):
        spmd.device()
    spmd.use_spmd()
    assert spmd.is_spmd()
    assert spmd.global_device_count() == 2
    with pytest.raises(AlreadyInSpmdModeError, match="2 workers already"):
        spmd.use_spmd()
    sent, kept = there([1.0]), there([2.0])
    twice = sent * 2
    spmd.sync()
    recorded = twice + 1
    spmd.shutdown()
    with pytest.raises(NotInSpmdModeError, match="lost with the workers"):
        sent + 1
    with pytest.raises(NotInSpmdModeError):
        torch.ones(2, device="spmd")
    spmd.use_spmd(workers=["worker2"])  # once more, with others
    assert spmd.global_device_count() == 1
    assert there([2.0]).item() == 2.0
    for old in (sent, twice, recorded, twice[:1]):
        with pytest.raises(NotInSpmdModeError, match=r"made before spmd\.shutdown"):
            old + 1
        with pytest.raises(NotInSpmdModeError, match=r"made before spmd\.shutdown"):
            old.cpu()
    assert kept.item() == 2.0  # no worker ever had it
    spmd.shutdown()


@in_standing_group(3)
def test_workers_must_be_there() -> None:
    with pytest.raises(SpmdError, match="up to 2 workers"):
        spmd.use_spmd(workers=5)
    with pytest.raises(SpmdError, match="names of other workers"):
        spmd.use_spmd(workers=["worker0"])


@in_standing_group(3)
def test_other_distributed_libraries_are_refused() -> None:
    spmd.use_spmd()
    with pytest.raises(SpmdError, match="SPMD mode"):
        spmd.init_process_group()
    assert not dist.is_initialized()
    spmd.shutdown()


@in_standing_group(3)
def test_what_cannot_be_mixed_says_what_to_do() -> None:
    spmd.use_spmd()
    x = there([1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"\.to\(spmd\.device\(\)\)"):
        x + torch.ones(2)
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        x.numpy()
    with pytest.raises(RuntimeError, match="spmd:0"):
        x.data = torch.ones(2)
    with pytest.raises(
        NotImplementedError, match="expected a generator of the device 'spmd:0', got one of cpu"
    ):
        torch.rand(2, device=spmd.device(), generator=torch.Generator())
    spmd.shutdown()


@in_standing_group(3)
def test_what_is_replicated_is_reported_and_strictly_an_error() -> None:
    spmd.use_spmd()
    x = there([[3.0, 1.0], [2.0, 4.0]], ROWS)
    assert not spmd.report().lines
    x.sort(0)
    (line,) = [each for each in spmd.report().lines if each.operator.startswith("aten::sort")]
    assert line.count == 1
    assert line.bytes == 16
    assert "test_spmd_failures.py" in line.where
    with spmd.strict(), pytest.raises(ReshardingError, match="aten::sort"):
        x.sort(0)
    with spmd.strict():
        (x * 2).sum().item()
    assert value_layout(x) == ROWS
    spmd.shutdown()


# ---- beginning


@in_processes(2)
def test_the_mode_begins_before_the_first_backward(worker: Worker) -> None:
    with worker.group():
        if worker.rank == 0:
            torch.autograd.backward(torch.ones(2, requires_grad=True).sum())
            with pytest.raises(SpmdError, match="before the first backward"):
                spmd.use_spmd()
            assert not spmd.is_spmd()


_asked = threading.Event()


def ask() -> None:
    _asked.set()


def drive_idly(worker: Worker) -> None:
    with worker.group():
        spmd.use_spmd()
        for name in ("worker1", "worker2"):
            rpc.rpc_sync(name, ask)
        worker.report("idle")
        worker.wait_for("on")
        assert there([1.0, 2.0]).sum().item() == 3.0
        spmd.shutdown()


def serve_idly(worker: Worker) -> None:
    """Reports what the log has of its wait, which is looked at every 10 ms."""
    looked, shown = itertools.count(1), []

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    def due(self: notices.Notices) -> bool:
        is_due = plain(self)
        if is_due and _asked.is_set() and next(looked) == 4:
            worker.report("idle", [each for each in shown if "in shutdown" in each])
        return is_due

    logging.getLogger("rpc").addHandler(Log(logging.WARNING))
    plain = notices.Notices.due
    with (
        mock.patch.multiple(notices, FIRST_SECONDS=0.01, _LONGEST_SECONDS=0.01),
        mock.patch.object(notices.Notices, "due", due),
        pytest.raises(SystemExit),
    ):
        worker_process.serve(worker.name, worker.rank, worker.world_size, worker.init_method)


def test_workers_do_not_warn_of_an_idle_driver(run_workers: RunWorkers) -> None:
    workers = run_workers.start([drive_idly, serve_idly, serve_idly])
    workers[0].wait_for("idle")
    assert [each.wait_for("idle") for each in (workers[1], workers[2])] == [[], []]
    workers[0].tell("on")
    workers.results()


def die_between_sends(worker: Worker) -> None:
    worker.join()
    spmd.use_spmd()
    rows = there([[1.0], [2.0]], ROWS)
    spmd.sync()

    def die(*_: object) -> None:
        rpc.rpc_sync("worker1", ask)  # it has what was sent before
        worker.die()

    last = current_mode().ports[1]
    with mock.patch.object(last, "send", die):
        rows.sum().item()


def test_workers_of_a_driver_that_dies_between_its_sends_do_not_wait_for_each_other(
    run_workers: RunWorkers,
) -> None:
    workers = run_workers.start([die_between_sends, serve, serve])
    assert [each.result() for each in (workers[1], workers[2])] == [None, None]
