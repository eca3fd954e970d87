"""Silence, on a clock that the test moves."""

from __future__ import annotations

from rpc.group.liveness import Liveness

A, B = 1, 2


def look_for(
    liveness: Liveness, seconds: float, signs: dict[int, int], start: float
) -> list[tuple[float, int]]:
    """Looks at every interval; when who was found to be silent."""
    found: list[tuple[float, int]] = []
    for index in range(1, round(seconds / liveness.interval) + 1):
        now = start + index * liveness.interval
        found += [(now - start, worker) for worker in liveness.look(now, signs)[1]]
    return found


def test_who_gives_no_sign_is_silent_within_the_bound_and_not_much_sooner() -> None:
    liveness = Liveness(30)
    liveness.look(100.0, {A: 5})
    found = look_for(liveness, 60, {A: 5}, 100.0)
    assert found[0][1] == A
    assert 25 <= found[0][0] <= 30


def test_any_sign_starts_the_silence_anew_and_only_who_says_nothing_is_asked() -> None:
    liveness = Liveness(12)
    asked: list[int] = []
    for second in range(100):
        ask, silent = liveness.look(float(second), {A: second, B: second // 8})
        asked += ask
        assert silent == []
    assert A not in asked
    assert B in asked


def test_nobody_is_silent_who_is_not_watched() -> None:
    liveness = Liveness(12)
    for second in range(100):
        watched = {A: 0} if second % 11 < 5 else {}
        assert liveness.look(float(second), watched)[1] == []


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    liveness = Liveness(12)
    liveness.look(0.0, {A: 1})
    liveness.look(1.0, {A: 1})
    assert liveness.look(1000.0, {A: 1})[1] == []


def test_who_is_excused_may_be_silent_for_as_long_again_and_never_is_where_there_is_no_bound() -> None:
    liveness = Liveness(12)
    liveness.look(0.0, {A: 1})
    assert look_for(liveness, 12, {A: 1}, 0.0) == [(11.0, A), (12.0, A)]
    liveness.excuse(A)
    assert look_for(liveness, 11, {A: 1}, 12.0) == []
    assert look_for(Liveness(0), 1000, {A: 1}, 0.0) == []
