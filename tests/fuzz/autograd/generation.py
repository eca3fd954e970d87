"""Random programs: ``generate(seed)`` makes the same one each time, and every one of them is valid."""

from __future__ import annotations

from tests.fuzz.autograd.body_generation import BodyGenerator
from tests.fuzz.autograd.drafts import Draft
from tests.fuzz.autograd.program import Manner, Plan, Program


def generate(seed: int) -> Program:
    """The program of a seed."""
    draft = Draft(seed)
    random = draft.random
    main = BodyGenerator(draft, random.randrange(draft.workers), [], Manner.PLAIN, 3, {})
    main.wander(random.randint(4, 10), calls=0.5)
    roots = tuple(main.root() for _ in range(random.choice((1, 2, 2, 3))))
    main.finish([])
    driver = main.worker if random.random() < 0.65 else random.randrange(draft.workers)
    return Program(
        seed,
        draft.workers,
        draft.numbers,
        tuple(body for body in draft.bodies if body is not None),
        roots,
        random.choice(list(Plan)),
        3 if random.random() < 0.25 else 1,
        random.random() < 0.4,
        frozenset(worker for worker in range(draft.workers) if random.random() < 0.5),
        driver,
    )
