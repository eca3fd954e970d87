"""Programs in which something goes wrong: an error is raised in a backward, or a worker dies.

What must hold is always the same: the backward ends promptly with an error that says where it comes from, and
no worker that lives keeps anything of the context.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import rpc
from rpc.errors import RpcTimeoutError, WorkerLostError
from tests.fuzz.autograd.distribution import introduce, leftovers, name_of, run_over_workers
from tests.fuzz.autograd.generation import generate
from tests.fuzz.autograd.interpretation import Strike, no_strike
from tests.fuzz.autograd.links import Link
from tests.fuzz.autograd.program import Program
from tests.fuzz.autograd.reference import run_in_one_process
from tests.fuzz.autograd.session import Outcome, check, stacks_of_all
from tests.support.workers import Worker, current_worker

TIME_LIMIT = 40.0
"""Seconds after which a program that should have failed hangs."""

PROMPTLY = 20.0
"""Maximum time in seconds from a death to the error: milliseconds on an idle machine, longer on a busy one. A
worker that is silent, but has not died, is lost after 30 s.
"""

SURVIVED = "no error came out"


class PlannedError(Exception):
    """What a hook or custom function raises."""


@dataclass(frozen=True)
class Raise:
    """Raises an error where a hook or custom function of this key runs."""

    key: str

    def __call__(self, key: str) -> None:
        if key == self.key:
            raise PlannedError(f"planned in {key}")


@dataclass(frozen=True)
class Die:
    """Kills its worker where a hook or custom function of this key runs."""

    key: str

    def __call__(self, key: str) -> None:
        if key == self.key:
            current_worker().die()


def lead_through_errors(worker: Worker, link: Link, seeds: Iterable[int]) -> None:
    """What the first worker runs, while the others serve: in each program one hook or function raises."""
    with worker.group(**link.options):
        _introduce(worker.world_size)
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


def lead_through_a_death(worker: Worker, link: Link, seed: int) -> None:
    """What the last worker runs, while the others serve: one of them dies in the middle of a program.

    Half of the programs have it die in a hook or custom function, the others at any moment.
    """
    workers = worker.world_size - 1
    random = Random(seed)
    with worker.group(**link.options):
        _introduce(workers)
        started = time.perf_counter()
        program, places = program_with_user_code(seed)
        victim, key = random.choice(places)
        if random.random() < 0.5:
            problems = _run_into_death(program, victim, Die(key))
        else:
            key = f"{random.random() * 0.3:.3f} s"
            with contextlib.suppress(WorkerLostError):  # at once, before it has answered
                rpc.rpc_sync(name_of(victim), die_after, args=(float(key.split()[0]),))
            problems = _run_until_death(seed, victim)
        living = [other for other in range(worker.world_size) if other != victim]
        problems += leftovers(living)
        if problems:
            problems += [f"death in '{key}' of {name_of(victim)}", str(program)]
        worker.report("outcome", _outcome(seed, problems, started))


def _introduce(workers: int) -> None:
    for worker in range(workers):
        rpc.rpc_sync(name_of(worker), introduce, args=(workers,))


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
    return [SURVIVED]


def _run_into_death(program: Program, victim: int, strike: Strike = no_strike) -> list[str]:
    """Runs a program in which a worker dies; what is wrong with the error that comes out."""
    started = time.monotonic()
    try:
        run_over_workers(program, TIME_LIMIT, {victim: strike})
    except RpcTimeoutError:
        return [f"it hangs; stacks of all threads:\n{stacks_of_all(program.workers, without=victim)}"]
    except Exception as error:
        took = time.monotonic() - started
        late = [f"it took {took:.1f} s until the error came"] if took > PROMPTLY else []
        return late + _wrong_about(error, victim)
    return [SURVIVED]


def _run_until_death(seed: int, victim: int) -> list[str]:
    """Runs programs in which a worker takes part until it dies."""
    deadline = time.monotonic() + TIME_LIMIT
    programs = (generate(each) for each in itertools.count(seed))
    for program in programs:
        if victim < program.workers:
            problems = _run_into_death(program, victim)
            if problems != [SURVIVED] or time.monotonic() > deadline:
                return problems
    raise AssertionError("there are always more programs")


def _wrong_about(error: Exception, victim: int) -> list[str]:
    told = "".join(traceback.format_exception(error))
    return [] if name_of(victim) in str(error) else [f"the error does not name {name_of(victim)}:\n{told}"]


def _outcome(seed: int, problems: list[str], started: float) -> Outcome:
    hung = any("stacks" in problem for problem in problems)
    return Outcome(seed, tuple(problems), hung, False, 0, 0, time.perf_counter() - started)


# ---- called remotely


def die_after(seconds: float) -> None:
    """Kills this worker in a while."""
    timer = threading.Timer(seconds, current_worker().die)
    timer.daemon = True
    timer.start()
