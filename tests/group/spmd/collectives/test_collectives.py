"""Random programs of collectives, in groups of any size, many at once, give what gloo gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.group.spmd.programs import SIZE, Call, Runner, programs
from tests.support.effort import EFFORT, PROFILE
from tests.support.process_groups import by_messages, process_group
from tests.support.workers import RunWorkers, Worker, Workers, WorkersFailed, fork_server_key

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300 * EFFORT)]  # what fails is made smaller

Run: TypeAlias = Callable[[Sequence[Call]], None]
EXAMPLES = settings(PROFILE, max_examples=20 * EFFORT, phases=[Phase.generate, Phase.shrink])


def serve(apart: bool, worker: Worker) -> None:
    """Runs programs as the test sends them."""
    with process_group(worker, options=by_messages() if apart else None):
        runner = Runner(worker.rank)
        while (program := worker.wait_for("program")) is not None:
            worker.report("done", runner.run(program))


class Pool:
    """Processes that run programs. Where one has failed, the next program gets others."""

    def __init__(self, run_workers: RunWorkers, apart: bool) -> None:
        self._run_workers = run_workers
        self._apart = apart
        self._workers: Workers | None = None

    def run(self, program: Sequence[Call]) -> None:
        """Run a program in all of them.

        Raises:
            WorkersFailed: one has failed.
        """
        if self._workers is None:
            self._workers = self._run_workers.start(partial(serve, self._apart), SIZE, time_limit=120)
        try:
            self._workers.restart_clock()
            self._workers.tell("program", program)
            wrong = [text for each in self._workers.wait_for("done") for text in each]
        except WorkersFailed:
            self._workers = None
            raise
        assert not wrong, "\n".join(wrong)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.tell("program")
            self._workers.results()


@pytest.fixture(scope="module", params=[False, True], ids=["shared memory", "messages"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a program in processes that all tests share."""
    run_workers = RunWorkers(request.config.stash[fork_server_key], tmp_path_factory.mktemp("programs"))
    pool = Pool(run_workers, request.param)
    yield pool.run
    pool.close()
    run_workers.close()


@EXAMPLES
@given(data=st.data())
def test_a_program_of_collectives_gives_what_gloo_gives(run: Run, data: st.DataObject) -> None:
    run(data.draw(programs()))
