"""Tracebacks keep the program's frames and leave out this distribution's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpc.api import rpc_sync
from rpc.errors import NotInitializedError, SerializationError
from rpc.options import AgentOptions
from rpc.runtime.code_folders import OURS
from rpc.runtime.tracebacks import fold_uncaught, folded, in_one_line, place_of, show_as


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def files(text: str) -> set[str]:
    return {line.split('"')[1] for line in text.splitlines() if line.startswith("  File ")}


def call_without_a_group() -> None:
    rpc_sync("worker1", print)


def test_frames_of_this_distribution_are_left_out() -> None:
    with pytest.raises(NotInitializedError) as caught:
        call_without_a_group()
    text = folded(caught.value)
    assert files(text) == {__file__}
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith(f"NotInitializedError: {caught.value}\n")


def test_nothing_is_left_out_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TRACEBACKS", "full")
    with pytest.raises(NotInitializedError) as caught:
        call_without_a_group()
    assert len(files(folded(caught.value))) > 1


def test_an_error_without_a_frame_of_the_program_keeps_its_frames() -> None:
    with pytest.raises(NotInitializedError) as caught:
        rpc_sync("worker1", print)
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next
    assert files(folded(caught.value)) - {__file__}


def test_a_users_callback_between_frames_of_ours_is_kept() -> None:
    def user_reducer() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        concurrent.futures.ThreadPoolExecutor(1).submit(user_reducer).result()
    text = folded(caught.value)
    assert "in user_reducer" in text
    assert concurrent.futures.__name__.replace(".", "/") in text, "called by the program, not by us"


def inner_cause(text: str) -> BaseException:
    """An error whose traceback has frames of this distribution only."""
    with pytest.raises(NotInitializedError) as caught:
        rpc_sync("worker1", print)
    trace = caught.value.__traceback__
    return TypeError(text).with_traceback(trace and trace.tb_next)


def test_a_cause_within_this_distribution_is_left_out_if_the_error_says_it() -> None:
    error = raised(
        SerializationError("argument 0: cannot pickle a lock"), inner_cause("cannot pickle a lock")
    )
    assert folded(error).count("cannot pickle a lock") == 1
    assert "direct cause" not in folded(error)


def test_a_cause_within_this_distribution_is_shown_without_frames_otherwise() -> None:
    text = folded(raised(SerializationError("argument 0"), inner_cause("cannot pickle a lock")))
    assert "TypeError: cannot pickle a lock\n\nThe above exception was the direct cause" in text
    assert files(text) == {__file__}


def test_a_cause_of_the_program_keeps_its_frames() -> None:
    text = folded(raised(RuntimeError("outer"), raised(ValueError("inner"))))
    assert text.count("in raised\n") == 2


def test_a_group_of_errors_is_folded_in_each_member() -> None:
    with pytest.raises(NotInitializedError) as caught:
        call_without_a_group()
    text = folded(raised(ExceptionGroup("two", [caught.value, ValueError("b")])))
    assert "rpc/api.py" not in text


def test_of_another_workers_traceback_without_frames_of_the_program_its_name_is_left() -> None:
    def noted(error: BaseException, *files: str) -> BaseException:
        frames = "".join(f'  File "{file}", line 1, in one\n    one()\n' for file in files)
        trace = f"Traceback (most recent call last):\n{frames}ValueError: {error}\n"
        error.add_note(f"\nTraceback on worker 'worker1':\n{trace}")
        return error

    assert folded(noted(raised(ValueError("no")), OURS[0] + "a.py", OURS[0] + "b.py")).endswith(
        "ValueError: no\nRaised on worker 'worker1'\n"
    )
    text = folded(noted(raised(ValueError("no")), OURS[0] + "a.py", "program.py"))
    assert "Traceback on worker 'worker1':" in text
    assert 'File "program.py"' in text
    never_raised = folded(noted(ValueError("no"), OURS[0] + "a.py"))
    assert "a.py" in never_raised, "the fault may be ours"


def test_a_future_of_pytorch_is_left_out_where_ours_wait_for_it() -> None:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_exception(ValueError("as told"))  # type: ignore[arg-type]
    scope: dict[str, Any] = {}
    exec(compile("def value(future): return future.value()", OURS[0] + "a.py", "exec"), scope)
    with pytest.raises(ValueError, match="as told") as caught:
        scope["value"](future)
    assert files(folded(caught.value)) == {__file__}


@pytest.mark.parametrize("full", [False, True])
def test_a_long_text_is_not_repeated_at_the_end_of_a_note(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_TRACEBACKS", "full" if full else "")
    long = "what was asked, " * 10 + "and what to do"
    error = ValueError(long)
    error.add_note(f"Traceback on worker 'worker1':\n  their frame\nValueError: {long}\n")
    error.add_note("another")
    text = folded(error)
    assert text.count(long) == 1 + full
    assert "  their frame\nValueError: what was asked," in text
    assert text.endswith("another\n")


def test_an_error_in_one_line_names_the_programs_line() -> None:
    with pytest.raises(NotInitializedError) as caught:
        call_without_a_group()
    line = call_without_a_group.__code__.co_firstlineno + 1
    assert place_of(caught.value) == f" at {__file__}:{line}"
    assert in_one_line(caught.value).startswith(f"NotInitializedError at {__file__}:{line}: ")
    assert "\n" not in in_one_line(ValueError("a\nb"))


def test_a_cause_that_has_lost_its_frames_is_left_out_if_the_error_says_it() -> None:
    text = folded(raised(SerializationError("cannot pickle a lock"), TypeError("cannot pickle a lock")))
    assert text.count("cannot pickle a lock") == 1
    assert "KeyError" in folded(raised(SerializationError("not found"), KeyError()))


def call_in_pool(_: int) -> None:
    call_without_a_group()


def map_in_pool() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(call_in_pool, range(2))


def submit_to_executor() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        executor.submit(call_in_pool, 0).result()


@pytest.mark.parametrize("run", [map_in_pool, submit_to_executor])
def test_an_error_of_a_pools_process_is_shown_once_with_the_frames_of_both(run: Callable[[], None]) -> None:
    with pytest.raises(NotInitializedError) as caught:
        run()
    text = folded(caught.value)
    assert files(text) == {__file__}
    assert text.count(str(caught.value)) == 1
    assert text.index(str(caught.value)) < text.index("of the pool") < text.index("in call_without_a_group")


def test_the_initializer_of_a_data_class_of_ours_is_left_out() -> None:
    with pytest.raises(TypeError) as caught:
        AgentOptions(num_worker_threads="many")  # type: ignore[arg-type]
    assert files(folded(caught.value)) == {__file__}


def test_uncaught_errors_are_printed_without_frames_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    fold_uncaught()
    with pytest.raises(NotInitializedError) as caught:
        call_without_a_group()
    for error in (caught.value, raised(ValueError("the program's own"))):
        sys.excepthook(type(error), error, error.__traceback__)
        assert capsys.readouterr().err == folded(error)


def test_an_uncaught_error_is_printed_as_a_given_text_by_a_hook_around_the_one_that_folds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    fold_uncaught()
    inner = sys.excepthook

    def as_pytorchs(*args: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as written:
            inner(*args)
        sys.stderr.write(f"[rank0]: {written.getvalue()}")

    sys.excepthook = as_pytorchs
    error = raised(ValueError("the program's own"))
    show_as(error, "in one line\n")
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "[rank0]: in one line\n"


def test_a_programs_own_hook_for_uncaught_errors_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", own)
    fold_uncaught()
    assert sys.excepthook is own
