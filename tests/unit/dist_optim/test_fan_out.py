"""Notes about what an operation on all owners has done on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dist_autograd.root import Steps
from dist_optim.fan_out import add_steps


class Named:
    """A worker; something happens when its name is asked for."""

    def __init__(self, name: str, meanwhile: Callable[[], object] = int) -> None:
        self._name = name
        self._meanwhile = meanwhile

    @property
    def name(self) -> str:
        self._meanwhile()
        return self._name


def test_parts_may_end_while_the_steps_are_listed() -> None:
    steps, error = Steps({}), ValueError()
    late: Any = Named("late")
    done: list[Any] = [Named(f"worker{rank}", lambda: steps.done.add(late)) for rank in (2, 1)]
    steps.begun |= {late, *done}
    steps.done |= set(done)
    add_steps(error, steps)
    assert error.__notes__ == ["step was done on 'worker1', 'worker2'", "step is under way on 'late'"]
