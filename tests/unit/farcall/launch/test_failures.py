"""Which of several failures is reported as the first, and how."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.autograd

from farcall.launch import failures
from farcall.launch.failures import Failure, is_of_pytorchs_rpc, record, shown_by
from rpc.errors import WorkerLostError
from rpc.runtime.tracebacks import folded
from spmd.collectives.errors import RankLostError

RAISED = Failure(0, 10, 1, 3.0, "LookupError: bad luck", "Traceback ...")
LOST_ANOTHER = Failure(1, 11, 1, 2.0, "WorkerLostError: worker0 is lost", "Traceback ...", is_loss=True)
KILLED = Failure(2, 12, -9, 4.0)
EXITED = Failure(3, 13, 3, 1.0)
ENDED_BY_US = Failure(4, 14, -15, 0.0)


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([ENDED_BY_US, EXITED], EXITED),
        ([EXITED, LOST_ANOTHER], LOST_ANOTHER),
        ([LOST_ANOTHER, RAISED], RAISED),
        ([RAISED, KILLED], KILLED),
        (
            [RAISED, Failure(5, 15, 1, 2.5, "ValueError: first", "")],
            Failure(5, 15, 1, 2.5, "ValueError: first", ""),
        ),
    ],
)
def test_the_likeliest_cause_is_the_first_failure(failures: list[Failure], cause: Failure) -> None:
    assert Failure.first(failures) == cause


@pytest.mark.parametrize(
    ("failure", "status", "what"),
    [
        (RAISED, 1, "raised LookupError: bad luck"),
        (KILLED, 137, "was killed by SIGKILL"),
        (EXITED, 3, "ended with status 3"),
        (ENDED_BY_US, 143, "was killed by SIGTERM"),
    ],
)
def test_a_failure_has_a_shells_status(failure: Failure, status: int, what: str) -> None:
    assert (failure.exit_status, failure.what) == (status, what)


def test_the_summary_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    Failure(0, 10, 1, 3.0, "ValueError: \x1b[2J\udc80 bad").sum_up()
    said = capsys.readouterr().err
    assert said == "farcall: rank 0 (process 10) failed first: it raised ValueError: \\x1b[2J\\udc80 bad\n"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


def test_an_exception_without_a_text_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_ERROR_FILE", str(tmp_path / "record"))
    record(Unprintable(), "Traceback ...")
    left = Failure.of(0, 1, 1, tmp_path / "record")
    assert left.what == "raised Unprintable: <exception str() failed>"


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (WorkerLostError("worker0 is gone"), True),
        (RankLostError("rank 0 is gone"), True),
        (type("RankLostError", (Exception,), {})("a program's own"), False),
        (type("WorkerLostErrors", (Exception,), {})("a program's own"), False),
    ],
    ids=["worker", "rank", "other of this name", "other with such a name"],
)
def test_only_our_losses_of_others_are_consequences(
    error: Exception, is_loss: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_ERROR_FILE", str(tmp_path / "record"))
    record(error, "Traceback ...")
    left = Failure.of(0, 1, 1, tmp_path / "record")
    assert left.is_loss == is_loss
    earlier = replace(RAISED, at=0.0)
    later = replace(RAISED, at=left.at + 1)
    assert Failure.first([left, earlier]) == earlier
    assert Failure.first([left, later]) == (later if is_loss else left)


@pytest.mark.parametrize("uses_farcall", [True, False])
def test_an_error_of_pytorchs_own_rpc_is_known(uses_farcall: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "is_initialized", lambda: uses_farcall)
    with pytest.raises(RuntimeError) as caught, torch.distributed.autograd.context():
        pass
    assert is_of_pytorchs_rpc(caught.value) == uses_farcall
    assert not is_of_pytorchs_rpc(ValueError())


def fails(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_a_traceback_is_printed_by_the_first_of_the_processes_that_raise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(rank: int, start: int, error: BaseException) -> str | None:
        monkeypatch.setenv("FARCALL_ERROR_FILE", str(tmp_path / f"rank{rank}-{start}.json"))
        return shown_by(error, folded(error))

    assert shown(1, 1, fails("of rank 1")) is None
    assert shown(0, 1, fails("of rank 0")) == "1", "the same lines, with another text"
    assert shown(0, 1, raised_elsewhere := raised_in_another_line()) is None
    assert shown(2, 1, raised_elsewhere) == "0"
    assert shown(0, 2, fails("after a restart")) is None
    monkeypatch.setenv("FARCALL_TRACEBACKS", "full")
    assert shown(2, 2, fails("all are wanted")) is None
    monkeypatch.delenv("FARCALL_TRACEBACKS")
    assert shown(0, 1, fails("again")) == "1"
    monkeypatch.delenv("FARCALL_ERROR_FILE")
    lonely = fails("without a launcher")
    assert shown_by(lonely, folded(lonely)) is None


def test_an_error_of_another_cause_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(rank: int, cause: ValueError) -> str | None:
        monkeypatch.setenv("FARCALL_ERROR_FILE", str(tmp_path / f"rank{rank}-0.json"))
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError from cause
        return shown_by(caught.value, folded(caught.value))

    assert shown(0, fails("one")) is None
    assert shown(1, raised_in_another_line()) is None
    assert shown(2, fails("two")) == "0"


def test_an_old_traceback_is_not_referred_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_ERROR_FILE", str(tmp_path / "rank0-0.json"))
    trace = folded(error := fails("again"))
    assert shown_by(error, trace) is None
    (note,) = tmp_path.glob("traceback-*")
    os.utime(note, (1.0, 1.0), follow_symlinks=False)
    assert shown_by(error, trace) is None


def raised_in_another_line() -> ValueError:
    try:
        raise ValueError
    except ValueError as error:
        return error
