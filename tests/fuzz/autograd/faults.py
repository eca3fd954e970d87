"""Programs in which an error is raised in a backward: it ends with that error, and no worker keeps anything
of the context. Deaths are for the simulation, ``tests/simulation/gradients.py``.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import rpc
from rpc.errors import RpcTimeoutError
from tests.fuzz.autograd.distribution import introduce, leftovers, name_of, run_over_workers
from tests.fuzz.autograd.generation import generate
from tests.fuzz.autograd.links import Link
from tests.fuzz.autograd.program import Program
from tests.fuzz.autograd.reference import run_in_one_process
from tests.fuzz.autograd.session import Outcome, check, stacks_of_all
from tests.support.workers import Worker

TIME_LIMIT = 40.0
"""Seconds after which a program that should have failed hangs."""


class PlannedError(Exception):
    """What a hook or custom function raises."""


@dataclass(frozen=True)
class Raise:
    """Raises an error where a hook or custom function of this key runs."""

    key: str

    def __call__(self, key: str) -> None:
        if key == self.key:
            raise PlannedError(f"planned in {key}")


def lead_through_errors(worker: Worker, link: Link, seeds: Iterable[int]) -> None:
    """What the first worker runs, while the others serve: in each program one hook or function raises."""
    with worker.group(**link.options):
        for other in range(worker.world_size):
            rpc.rpc_sync(name_of(other), introduce, args=(worker.world_size,))
        for seed in seeds:
            started = time.perf_counter()
            program, places = program_with_user_code(seed)
            where, key = Random(seed).choice(places)
            problems = _run_into_error(program, where, key)
            problems += leftovers(range(worker.world_size))
            problems += check(generate(seed + 1)).problems  # all works as if nothing had been
            if problems:
                problems += [f"error in '{key}' on {name_of(where)}", str(program)]
            worker.report("outcome", _outcome(seed, problems, started))


def program_with_user_code(seed: int) -> tuple[Program, list[tuple[int, str]]]:
    """A program, and where hooks and custom functions run in its backward: worker and key."""
    while True:
        program = generate(seed)
        context, shared = run_in_one_process(program)
        workers = {step.number: body.worker for body in program.bodies for step in body.steps}
        places = [(workers[int(key.split()[0])], key) for key in context.seen]
        places += [(int(re.findall(r"worker(\d+)", key)[0]), key) for key in shared.seen]
        if places:
            return program, places
        seed += 1_000_000  # this one has none


def _run_into_error(program: Program, where: int, key: str) -> list[str]:
    try:
        run_over_workers(program, TIME_LIMIT, {where: Raise(key)})
    except RpcTimeoutError:
        return [f"it hangs; stacks of all threads:\n{stacks_of_all(program.workers)}"]
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        return [] if f"planned in {key}" in str(error) else [f"another error came out:\n{told}"]
    return ["no error came out"]


def _outcome(seed: int, problems: list[str], started: float) -> Outcome:
    hung = any("stacks" in problem for problem in problems)
    return Outcome(seed, tuple(problems), hung, False, 0, 0, time.perf_counter() - started)
