"""Parts of other workers' backward passes, by the messages about them, in any order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dist_autograd.backward_messages import ABORT, MARK, WHOLE_PART
from dist_autograd.backwards import Backwards
from dist_autograd.contexts import Context
from dist_autograd.ddp import Models
from dist_autograd.worker_pass import WorkerPass
from rpc.agent.border import Border
from rpc.errors import AutogradError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.wire.frames import Frame

ME, ROOT, CONTEXT, NUMBER = 1, 2, 7, 5
root = cast(
    "Peer",
    SimpleNamespace(incarnation=ROOT, name="root", lost=None, reader=None, lost_error=WorkerLostError),
)


class Participating:
    """Backward passes of a worker that knows one context; ``on_find`` is called when that is looked up."""

    def __init__(self) -> None:
        self.context = Context(
            cast("Any", SimpleNamespace(requests=SimpleNamespace(border=Border()))), CONTEXT, ROOT, root
        )
        self.on_find: Callable[[], object] = lambda: None
        self.open = 0
        self.failures: list[BaseException] = []
        self.answers: list[dict[str, Any]] = []
        self.steps: list[tuple[Any, ...]] = []
        self.performs = True
        self._handlers: dict[int, Callable[[Peer, Frame], Any]] = {}
        self.gone: list[Callable[[Peer, str], object]] = []
        self.closed: list[Callable[[], object]] = []
        hooks = SimpleNamespace(gone=self.gone, awaited=[], closed=self.closed)
        postponed = SimpleNamespace(begin=lambda: self._opened(1))
        activity = SimpleNamespace(postponed=postponed, postponed_ended=lambda: self._opened(-1))
        answers = SimpleNamespace(
            fail=lambda peer, call_id, error: self.failures.append(error),
            answer=lambda peer, kind, call_id, payload: self.answers.append(payload.header),
        )
        requests = SimpleNamespace(accept=lambda request, run: (run, request), border=Border())
        executor = SimpleNamespace(submit=lambda task: task[0](task[1]), lend=lambda source, *, at_once: None)
        contexts = SimpleNamespace(
            incarnation=ME,
            find=self._find,
            on_end=lambda _: None,
            unknown=lambda _: AutogradError("it is over"),
            requests=requests,
        )
        models, step = Models(), self._performed
        parts: Any = (answers, None, None, activity, None, executor, contexts, models, step)
        self.backwards = Backwards(*parts)
        messages: Any = SimpleNamespace(on=lambda kind, handler, any_thread=False: self._on(kind, handler))
        self.backwards.register(messages, cast("Any", hooks))

    def _performed(self, *step: Any) -> bool:
        self.steps.append(step)
        return self.performs

    def _opened(self, change: int) -> None:
        self.open += change

    def _on(self, kind: int, handler: Callable[[Peer, Frame], Any]) -> None:
        self._handlers[kind] = handler

    def _find(self, context_id: int) -> Context:
        self.on_find()
        return self.context

    def receive(self, kind: int, header: dict[str, Any]) -> None:
        """Handle a message of the root, and what it leads to."""
        self.handle(kind, header)()

    def handle(self, kind: int, header: dict[str, Any]) -> Callable[[], object]:
        """Handle a message of the root; returns what it leads to."""
        task = self._handlers[kind](root, Frame(kind, 1, header, []))
        return (lambda: None) if task is None else lambda: task[0](task[1])


def asked(message: int | None = None) -> dict[str, Any]:
    return {"backward": [NUMBER, CONTEXT, False, [], message]}


def end(context: Context) -> None:
    context.over = True


def test_a_mark_that_arrives_after_its_abort_is_refused() -> None:
    worker = Participating()
    worker.receive(ABORT, {"abort": [NUMBER, "no gradient today"]})
    worker.receive(MARK, asked())
    worker.receive(WHOLE_PART, asked())
    assert len(worker.backwards) == worker.open == 0
    for failure in worker.failures:
        assert "given up by worker 'root': no gradient today" in str(failure)
    assert len(worker.failures) == 2


def test_a_part_that_arrives_after_a_mark_and_its_abort_is_refused() -> None:
    worker = Participating()
    worker.receive(MARK, asked())
    assert len(worker.backwards) == worker.open == 1
    worker.receive(ABORT, {"abort": [NUMBER, "no gradient today"]})
    worker.receive(WHOLE_PART, asked())
    assert len(worker.backwards) == worker.open == 0
    assert "no gradient today" in str(worker.failures[0])


@pytest.mark.parametrize("is_root", [True, False])
def test_a_pass_ends_with_the_worker_that_has_started_it_and_with_this_one(is_root: bool) -> None:
    """It may wait for the gradients of a third one, which has given up: only the root would say so."""
    worker = Participating()
    worker.receive(MARK, asked())
    if is_root:
        worker.gone[0](root, "it died")
    else:
        worker.closed[0]()
    assert len(worker.backwards) == worker.open == 0


@pytest.mark.parametrize("kind", [MARK, WHOLE_PART])
def test_no_pass_is_left_open_if_its_context_ends_while_it_is_entered(kind: int) -> None:
    worker = Participating()
    worker.on_find = lambda: end(worker.context)  # as another thread does
    worker.receive(kind, asked())
    assert len(worker.backwards) == worker.open == 0


@pytest.mark.parametrize("kind", [MARK, WHOLE_PART])
def test_no_pass_is_left_open_if_it_is_aborted_while_it_is_entered(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Participating()

    def made(*parts: Any) -> WorkerPass:
        worker.receive(ABORT, {"abort": [NUMBER, "no gradient today"]})  # as another thread does
        return WorkerPass(*parts)

    monkeypatch.setattr("dist_autograd.backwards.WorkerPass", made)
    worker.receive(kind, asked())
    assert len(worker.backwards) == worker.open == 0


def test_a_part_ends_with_the_step_that_its_start_asks_for() -> None:
    worker = Participating()
    worker.receive(MARK, asked())
    assert not worker.steps
    worker.receive(WHOLE_PART, asked() | {"object": [ROOT, 3]})
    assert worker.steps == [((ROOT, 3), CONTEXT)]
    assert not worker.failures


@pytest.mark.parametrize(("performs", "said"), [(True, {"stepped": True}), (False, {})])
def test_the_answer_to_a_part_says_whether_its_step_was_performed(
    performs: bool, said: dict[str, Any]
) -> None:
    worker = Participating()
    worker.performs = performs
    worker.receive(WHOLE_PART, asked() | {"object": [ROOT, 3]})
    assert worker.answers == [said]


def test_a_second_start_of_a_part_does_not_change_its_step() -> None:
    worker = Participating()
    run = worker.handle(WHOLE_PART, asked())
    worker.receive(WHOLE_PART, asked() | {"object": [ROOT, 3]})
    assert "has begun already" in str(worker.failures[0])
    run()
    assert worker.answers == [{}]
    assert not worker.steps


def test_no_step_is_performed_for_a_pass_that_has_failed() -> None:
    worker = Participating()
    worker.receive(MARK, asked())
    worker.receive(ABORT, {"abort": [NUMBER, "no gradient today"]})
    worker.receive(WHOLE_PART, asked() | {"object": [ROOT, 3]})
    assert len(worker.failures) == 1
    assert not worker.steps


def test_a_start_with_a_malformed_id_of_an_optimizer_is_a_violation() -> None:
    worker = Participating()
    with pytest.raises(ProtocolError):
        worker.receive(WHOLE_PART, asked() | {"object": [ROOT]})
    assert not worker.steps
