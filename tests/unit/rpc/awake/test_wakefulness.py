"""When cores are kept awake, in a simulated machine."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable

import pytest

from rpc.awake.accounts import Usage
from rpc.awake.wakefulness import Wakefulness

MILLISECOND = 0.001
MUCH = 0.4
LITTLE = 0.02
LONG = 100.0


class Machine:
    """A machine with a process that sends messages, and a host that steals a share of its time.

    Args:
        stolen: the share while all cores sleep that have nothing to do.
        stolen_awake: the share while a core is kept awake.
    """

    def __init__(self, stolen: float, stolen_awake: float = 0.01) -> None:
        self.shares = [stolen, stolen_awake]
        self.now = 1000.0
        self.core = 0
        self.awake: list[int] = []
        self.began_at: list[float] = []
        self.used = Usage(5.0, 50.0)
        self.unknown = False
        self.fails = False
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.wakefulness = Wakefulness(
            self.spin, lambda: self.core, self.usage, self.soon, self.later, lambda: self.now
        )

    def spin(self, core: int) -> Spinner:
        if self.fails:
            raise OSError("no more threads")
        return Spinner(self, core)

    def usage(self) -> Usage | None:
        return None if self.unknown else self.used

    def soon(self, function: Callable[[], None]) -> None:
        self.later(0.0, function)

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), function))

    def pass_time(self, seconds: float, share: float | None = None) -> None:
        """Let time pass in which a core is wanted, and run what is due then."""
        self.now += seconds
        share = self.shares[bool(self.awake)] if share is None else share
        self.used = Usage(self.used.stolen + share * seconds, self.used.wanted + seconds)
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()

    def send(self, seconds: float, cores: tuple[int, ...] = (0,)) -> None:
        """Send a message each millisecond, from these cores in turn."""
        until = self.now + seconds
        for core in itertools.cycle(cores):
            if self.now >= until:
                return
            self.core = core
            self.wakefulness.stir()
            self.pass_time(MILLISECOND)

    def send_until(self, condition: Callable[[], bool]) -> None:
        until = self.now + LONG
        while not condition():
            assert self.now < until, "it does not happen"
            self.send(MILLISECOND)

    @property
    def scheduled(self) -> int:
        return len(self._due)


class Spinner:
    def __init__(self, machine: Machine, core: int) -> None:
        assert core not in machine.awake
        self._machine = machine
        self._core = core
        machine.awake.append(core)
        machine.began_at.append(machine.now)

    def stop(self) -> None:
        self._machine.awake.remove(self._core)


def test_where_little_is_stolen_cores_sleep() -> None:
    machine = Machine(LITTLE)
    machine.send(10.0)
    assert not machine.began_at


def test_where_much_is_stolen_the_core_that_messages_are_sent_from_stays_awake() -> None:
    machine = Machine(MUCH)
    machine.send(1.0, cores=(3,))
    assert machine.awake == [3]


def test_two_cores_stay_awake_at_most() -> None:
    machine = Machine(MUCH)
    machine.send(1.0, cores=(1, 2, 3))
    assert len(machine.awake) == 2


def test_a_core_that_is_used_no_more_sleeps_while_another_does_not() -> None:
    machine = Machine(MUCH)
    machine.send(1.0, cores=(1, 2))
    machine.send(0.2, cores=(2,))
    assert machine.awake == [2]


def test_cores_sleep_when_no_message_follows() -> None:
    machine = Machine(MUCH)
    machine.send(1.0)
    machine.pass_time(0.1)
    assert not machine.awake
    assert not machine.scheduled


def test_cores_stay_awake_at_once_when_messages_come_again() -> None:
    machine = Machine(MUCH)
    machine.send(1.0)
    machine.pass_time(0.1)
    machine.send(0.02)
    assert machine.awake


@pytest.mark.parametrize("pause", [0.06, 0.0])
def test_messages_that_do_not_follow_quickly_keep_nothing_awake(pause: float) -> None:
    machine = Machine(MUCH)
    for _ in range(200):
        machine.wakefulness.stir()
        machine.pass_time(pause)
    assert not machine.began_at
    assert not machine.scheduled


def test_what_is_stolen_where_cores_sleep_is_seen_again_now_and_then() -> None:
    machine = Machine(MUCH)
    machine.send_until(lambda: bool(machine.awake))
    machine.shares = [LITTLE, LITTLE / 10]
    machine.send(20.0)
    assert not machine.awake
    assert len(machine.began_at) == 1


def test_that_is_done_less_often_the_longer_much_is_stolen() -> None:
    machine = Machine(MUCH)
    machine.send(60.0)
    first, second, third = machine.began_at[:3]
    assert third - second > 1.9 * (second - first)
    assert second - first > 3.0


def test_what_does_not_help_is_given_up_for_a_minute() -> None:
    machine = Machine(MUCH, stolen_awake=MUCH)
    machine.send(59.0)
    assert len(machine.began_at) == 1
    assert not machine.awake
    machine.send(5.0)
    assert len(machine.began_at) == 2


def test_what_is_stolen_while_the_process_is_stopped_does_not_count() -> None:
    machine = Machine(LITTLE)
    for _ in range(100):
        machine.send(0.1)
        machine.pass_time(0.2, share=0.9)
    assert not machine.began_at


def test_a_core_that_cannot_be_kept_awake_is_left_alone_for_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine(MUCH)
    machine.fails = True
    with caplog.at_level(logging.INFO):
        machine.send(50.0)
    assert [record.getMessage() for record in caplog.records] == [
        "cores are not kept awake between messages: no more threads"
    ]
    machine.fails = False
    machine.send(20.0)
    assert machine.awake


def test_after_the_end_all_sleep() -> None:
    machine = Machine(MUCH)
    machine.send(1.0)
    machine.wakefulness.close()
    machine.wakefulness._keep_awake(5)  # asked for before
    assert not machine.awake
    machine.send(1.0)
    assert not machine.awake
    assert not machine.scheduled


def test_threads_that_ask_at_once_begin_once() -> None:
    machine = Machine(MUCH)
    machine.send(0.01)
    before = machine.scheduled
    machine.wakefulness._begin()
    assert machine.scheduled == before


def test_a_core_is_not_kept_awake_after_the_last_message() -> None:
    machine = Machine(MUCH)
    machine.send_until(lambda: bool(machine.awake))
    machine.pass_time(0.1)
    machine.wakefulness._keep_awake(5)  # asked for before, and late
    assert not machine.awake


def test_accounts_that_cannot_be_read_now_and_then_do_no_harm() -> None:
    machine = Machine(LITTLE)
    for _ in range(100):
        machine.unknown = not machine.unknown
        machine.send(0.015)
    assert not machine.began_at
    machine.shares[0] = MUCH
    machine.unknown = False
    machine.send(1.0)
    assert machine.awake


def test_accounts_that_go_backwards_do_no_harm() -> None:
    machine = Machine(MUCH)
    machine.send(0.05)
    machine.used = Usage(0.0, 0.0)
    machine.send(1.0)
    assert machine.awake


def test_after_little_was_stolen_it_is_seen_again_soon() -> None:
    machine = Machine(MUCH)
    machine.send(20.0)
    machine.shares[0] = LITTLE
    machine.send(60.0)
    machine.shares[0] = MUCH
    before = len(machine.began_at)
    machine.send(10.0)
    first, second = machine.began_at[before : before + 2]
    assert second - first < 5.0


def test_an_error_ends_it_until_messages_come_again() -> None:
    machine = Machine(MUCH)
    machine.send_until(lambda: bool(machine.awake))
    usual = machine.usage
    machine.wakefulness._usage = fail
    with pytest.raises(ArithmeticError):
        machine.send(0.1)
    assert not machine.awake
    machine.wakefulness._usage = usual
    machine.send(0.1)
    assert machine.awake


def fail() -> Usage:
    raise ArithmeticError
