"""A driver's set of workers, with workers that are answers in memory."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch

from rpc.agent.futures import Future
from spmd.collectives.errors import CollectiveError, StoreGivenUpError
from spmd.workers.joined_calls import JoinableCall, join, split
from spmd.workers.worker_set import WorkerSet, cause_of, wait_together

NEVER = 1e6  # seconds


class MemoryPort:
    """A worker whose answers the test gives."""

    def __init__(self, name: str, sent: list[str], error: Exception | None = None) -> None:
        self.name, self._sent, self._error = name, sent, error
        self.answer: Future[Any] = Future()
        self.aborted = threading.Event()
        self.skipped: list[int] = []

    def send(self, step: Any) -> Future[Any]:
        if self._error is not None:
            raise self._error
        self._sent.append(f"{self.name} {step}")
        return self.answer

    def abort(self, reason: str) -> None:
        self.aborted.set()
        if not self.answer.done():
            self.answer.set_exception(CollectiveError(reason))

    def skip(self, number: int) -> None:
        self.skipped.append(number)


def ports(*errors: Exception | None) -> tuple[list[MemoryPort], list[str]]:
    sent: list[str] = []
    return [MemoryPort(f"w{number}", sent, error) for number, error in enumerate(errors)], sent


def test_all_workers_get_a_step_and_the_given_one_last() -> None:
    made, sent = ports(None, None, None)
    workers = WorkerSet(made, "a step", NEVER, last=0)
    answers = workers.send(["a", "b", "c"])
    assert sent == ["w1 b", "w2 c", "w0 a"]
    assert workers.number == 1
    for number, port in enumerate(made):
        port.answer.set_result(number)
    assert workers.wait(0, answers) == ([0, 1, 2], {})
    assert not any(port.aborted.is_set() or port.skipped for port in made)


def test_a_step_that_the_first_worker_cannot_be_sent_is_sent_to_none() -> None:
    error = TypeError("cannot be sent")
    made, sent = ports(None, error, None)
    workers = WorkerSet(made, "a step", NEVER, last=0)
    _, failed = workers.wait(0, workers.send(["step"] * 3))
    assert {worker: str(each) for worker, each in failed.items()} == dict.fromkeys(range(3), str(error))
    assert not sent
    assert workers.number == 1
    assert [port.skipped for port in made] == [[0]] * 3


def test_a_step_that_another_worker_cannot_be_sent_is_done_by_the_rest_until_they_are_aborted() -> None:
    error = TypeError("cannot be sent")
    made, sent = ports(None, error, None)
    workers = WorkerSet(made, "a step", grace=0.0)
    _, failed = workers.wait(0, workers.send(["step"] * 3))
    assert sent == ["w0 step", "w2 step"]
    assert isinstance(failed[1], TypeError)
    assert isinstance(failed[0], CollectiveError)
    assert cause_of(failed) == 1
    assert workers.number == 1
    assert made[1].skipped == [0]


def test_a_step_that_was_interrupted_while_it_was_sent_fails_on_all_workers() -> None:
    made, sent = ports(None, None, None)
    made[1].send = lambda step: signal.default_int_handler(signal.SIGINT, None)  # type: ignore[method-assign]
    workers, answers = WorkerSet(made, "a step", grace=0.0), list[Any]()
    with pytest.raises(KeyboardInterrupt):
        workers.send(["step"] * 3, answers)
    assert sent == ["w0 step"]
    assert workers.number == 1
    _, failed = workers.wait(0, answers)
    assert isinstance(failed[0], CollectiveError)
    assert "a step was interrupted by KeyboardInterrupt" in str(failed[cause_of(failed)])
    assert [port.skipped for port in made[1:]] == [[0]] * 2


@pytest.mark.parametrize("answers", [False, True], ids=["raises", "answers"])
def test_workers_that_wait_for_one_that_has_failed_are_aborted(answers: bool) -> None:
    made, _ = ports(None, None)
    workers = WorkerSet(made, "a step", grace=0.0, has_failed=lambda answer: answer == "failed")
    under_way = workers.send(["step"] * 2)
    if answers:
        made[1].answer.set_result("failed")
    else:
        made[1].answer.set_exception(ValueError("failed"))
    values, failed = workers.wait(0, under_way)
    assert made[0].aborted.is_set()
    assert isinstance(failed[0], CollectiveError)
    assert values == ([None, "failed"] if answers else [None, None])


def test_workers_that_end_in_time_are_not_aborted() -> None:
    made, _ = ports(None, None)
    workers = WorkerSet(made, "a step", NEVER)
    under_way = workers.send(["step"] * 2)
    made[1].answer.set_exception(ValueError("failed"))
    made[0].answer.set_result("done")
    values, failed = workers.wait(0, under_way)
    assert values == ["done", None]
    assert list(failed) == [1]
    assert not made[0].aborted.is_set()


def test_errors_that_follow_from_another_are_not_the_cause() -> None:
    ended = CollectiveError("ended")
    assert cause_of({0: ended, 2: ValueError()}) == 2
    assert cause_of({1: ended, 2: ended}) == 1


def test_calls_that_can_only_end_together_raise_what_made_them_end() -> None:
    calls: list[Future[Any]] = [Future(), Future()]
    reasons = []

    def give_up(reason: str) -> None:
        reasons.append(reason)
        calls[1].set_exception(ValueError("the cause"))

    calls[0].set_exception(StoreGivenUpError("given up"))
    with pytest.raises(ValueError, match="the cause"):
        wait_together(calls, give_up)
    assert reasons == ["StoreGivenUpError: given up"]


# ---- calls done as one


def test_calls_are_joined_by_rows_and_results_cut() -> None:
    calls = [
        JoinableCall.of([torch.full((rows, 2), float(rows))], {"y": torch.ones(rows)}) for rows in (1, 3)
    ]
    joinable = [each for each in calls if each is not None]
    assert len(joinable) == 2
    assert joinable[0].kind == joinable[1].kind
    args, kwargs = join(joinable)
    assert [*args[0][:, 0].tolist()] == [1.0, 3.0, 3.0, 3.0]
    assert len(kwargs["y"]) == 4
    one, three = split({"x": args[0]}, [each.rows for each in joinable])
    assert one["x"].tolist() == [[1.0, 1.0]]
    assert three["x"].tolist() == [[3.0, 3.0]] * 3
    with pytest.raises(TypeError, match="as many rows"):
        split(args[0][:2], [1, 3])


@pytest.mark.parametrize(
    "args", [[], [torch.tensor(1.0)], [torch.ones(2), 3], [torch.ones(2), torch.ones(3)]], ids=str
)
def test_calls_of_other_things_than_rows_are_not_joined(args: list[Any]) -> None:
    assert JoinableCall.of(args, {}) is None


def test_calls_of_other_dtypes_sizes_or_names_are_of_other_kinds() -> None:
    calls = [
        JoinableCall.of([torch.ones(2, 3)], {}),
        JoinableCall.of([torch.ones(2, 4)], {}),
        JoinableCall.of([torch.ones(2, 3).double()], {}),
        JoinableCall.of([], {"x": torch.ones(2, 3)}),
    ]
    assert len({each.kind for each in calls if each is not None}) == 4
