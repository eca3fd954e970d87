"""Copies arrive whole, with and without help, and help is used where it is faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rpc.bulk.shared_memory import copying
from rpc.bulk.shared_memory.copying import Copier, Preference
from tests.support.streams import until

MIB = 1 << 20


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(cores=2)
    yield made
    made.close()
    until(lambda: not helpers())


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "farcall-copier"]


def buffers(size: int) -> tuple[memoryview, memoryview]:
    return memoryview(np.random.default_rng(0).bytes(size)), memoryview(bytearray(size))


@pytest.mark.parametrize("size", [0, 1, 5000, 256 << 10, MIB + 1, 16 * MIB, 33 * MIB + 7])
def test_copies_are_whole(copier: Copier, size: int) -> None:
    source, target = buffers(size)
    for _ in range(3):  # alone, with help, and as is found to be better
        copier.copy(source, target)
        assert target == source
        target[:] = bytes(size)


def test_only_long_copies_have_help(copier: Copier) -> None:
    for _ in range(5):
        copier.copy(*buffers(MIB))
    assert not helpers()
    for _ in range(2):
        copier.copy(*buffers(16 * MIB))
    assert len(helpers()) == 1


def test_on_one_core_there_is_no_help() -> None:
    copier = Copier(cores=1)
    for _ in range(3):
        copier.copy(*buffers(16 * MIB))
    assert not helpers()


def test_nobody_waits_for_a_helper_that_does_not_come(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    come = threading.Event()

    def come_late(work: copying._Work) -> None:
        come.wait()
        with work._helping:
            work.do()

    monkeypatch.setattr(copying._Work, "help", come_late)
    source, target = buffers(16 * MIB)
    for _ in range(2):
        copier.copy(source, target)
    assert helpers()
    assert target == source
    come.set()


def test_what_a_helper_is_still_at_is_waited_for(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    took, finishing = threading.Event(), threading.Event()
    do, finish = copying._Work.do, copying._Work.finish

    def take_first_and_be_late(work: copying._Work) -> None:
        with work._helping:
            start = next(work._starts)
            took.set()
            finishing.wait()
            piece = slice(start, start + work._piece)
            work.buffers[1][piece] = work.buffers[0][piece]

    def take_the_rest(work: copying._Work) -> None:
        took.wait()
        do(work)

    def be_first(work: copying._Work) -> None:
        finishing.set()
        finish(work)

    monkeypatch.setattr(copying._Work, "help", take_first_and_be_late)
    monkeypatch.setattr(copying._Work, "do", take_the_rest)
    monkeypatch.setattr(copying._Work, "finish", be_first)
    source, target = buffers(16 * MIB)
    copier.copy(source, target)
    target[:] = bytes(len(target))
    copier.copy(source, target)
    assert took.is_set()
    assert target == source


def test_an_interrupted_copy_leaves_the_helper_nothing(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: copying._Work) -> None:
        raise KeyboardInterrupt

    copier.copy(*buffers(16 * MIB))
    monkeypatch.setattr(copying._Work, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        copier.copy(*buffers(16 * MIB))
    monkeypatch.undo()
    source, target = buffers(16 * MIB)
    copier.copy(source, target)
    assert target == source


def test_an_interrupted_copy_waits_for_what_a_helper_is_still_at(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    took, finishing = threading.Event(), threading.Event()
    copied: list[int] = []
    finish = copying._Work.finish

    def take_first_and_be_late(work: copying._Work) -> None:
        with work._helping:
            start = next(work._starts)
            took.set()
            finishing.wait()
            copied.append(start)

    def interrupt(_: copying._Work) -> None:
        took.wait()
        raise KeyboardInterrupt

    def be_first(work: copying._Work) -> None:
        finishing.set()
        finish(work)

    monkeypatch.setattr(copying._Work, "help", take_first_and_be_late)
    monkeypatch.setattr(copying._Work, "do", interrupt)
    monkeypatch.setattr(copying._Work, "finish", be_first)
    copier.copy(*buffers(16 * MIB))
    with pytest.raises(KeyboardInterrupt):
        copier.copy(*buffers(16 * MIB))
    copied_when_it_ended = list(copied)
    finishing.set()
    assert copied_when_it_ended == [0]


def decide(preference: Preference, alone: float, helped: float, times: int = 200) -> list[bool]:
    """What is chosen, one time after the other, where each way always takes so long."""
    choices = []
    for _ in range(times):
        choices.append(preference.choose())
        preference.learn(choices[-1], helped if choices[-1] else alone)
    return choices


@pytest.mark.parametrize(
    ("alone", "helped", "better"), [(1.0, 1.5, False), (1.5, 1.0, True), (1, 0.95, False)]
)
def test_the_clearly_faster_way_is_preferred_and_the_other_tried_again(
    alone: float, helped: float, better: bool
) -> None:
    choices = decide(Preference(), alone, helped)
    assert set(choices[:10]) == {False, True}
    assert choices[10:].count(better) > 170
    assert (not better) in choices[100:]


def test_what_becomes_slower_is_left() -> None:
    preference = Preference()
    decide(preference, alone=1.5, helped=1.0)
    assert decide(preference, alone=1.5, helped=3.0)[-20:].count(True) <= 2


def test_a_single_slow_copy_changes_nothing() -> None:
    preference = Preference()
    decide(preference, alone=1.0, helped=1.5)
    preference.learn(False, 100.0)
    assert not preference.choose()
