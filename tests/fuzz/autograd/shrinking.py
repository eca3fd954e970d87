"""Makes a program that shows a defect smaller, step by step, as long as it still shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.autograd.program import Body, Call, Fetch, Keep, Operation, Plan, Program, Step, Style, Wait

__all__ = ["shrink", "simpler"]


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program on a way of single simplifications that fails.

    Args:
        fails: whether a program still shows the defect; a program that is not valid does not.
    """
    found = True
    while found:
        found = False
        for candidate in simpler(program):
            if fails(candidate):
                program, found = candidate, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less. They need not be valid: what is left may not fit together."""
    if program.remote_root:
        yield replace(program, driver=program.bodies[0].worker)
    if program.runs > 1:
        yield replace(program, runs=1)
    if program.plan is not Plan.ONCE:
        yield replace(program, plan=Plan.ONCE)
    if program.hooked:
        yield replace(program, hooked=frozenset())
    for index, root in enumerate(program.roots):
        rest = program.roots[:index], program.roots[index + 1 :]
        if len(program.roots) > 1:
            yield replace(program, roots=rest[0] + rest[1])
        if len(root) > 1:
            for some in range(len(root)):
                shorter = root[:some] + root[some + 1 :]
                yield replace(program, roots=(*rest[0], shorter, *rest[1]))
    for number, body in enumerate(program.bodies):
        for step in body.steps:
            yield _without(program, number, step)


def _without(program: Program, number: int, gone: Step) -> Program:
    """The program without a step. What it would have made is replaced by its first input, or a leaf."""
    body = program.bodies[number]
    steps = [step for step in body.steps if step is not gone]
    made = gone.slot if isinstance(gone, Keep) else gone.outputs
    made = (made,) if isinstance(made, str) else made
    if isinstance(gone, Call) and gone.style is Style.ASYNC:
        for wait in [step for step in steps if isinstance(step, Wait) and step.call == gone.number]:
            steps.remove(wait)
            made = wait.outputs
    instead = gone.inputs[0] if isinstance(gone, Operation) else "leaf0"
    names = dict.fromkeys(made, instead)
    bodies = list(program.bodies)
    bodies[number] = replace(body, steps=tuple(steps))
    if isinstance(gone, Keep):
        bodies = [_renamed(each, {gone.slot: "leaf0"}) for each in bodies]
    else:
        bodies[number] = _renamed(bodies[number], names)
    if isinstance(gone, Call):
        bodies = _emptied(bodies, gone.body)
    roots = program.roots
    if number == 0 or isinstance(gone, Keep):
        roots = tuple(tuple(names.get(name, name) for name in root) for root in roots)
    return replace(program, bodies=tuple(bodies), roots=roots)


def _renamed(body: Body, names: dict[str, str]) -> Body:
    def new(name: str) -> str:
        return names.get(name, name)

    steps: list[Step] = []
    for step in body.steps:
        match step:
            case Operation() | Call():
                steps.append(replace(step, inputs=tuple(map(new, step.inputs))))
            case Fetch():
                steps.append(replace(step, reference=new(step.reference)))
            case Keep():
                steps.append(replace(step, value=new(step.value)))
            case Wait():
                steps.append(step)
    return replace(body, steps=tuple(steps), results=tuple(map(new, body.results)))


def _emptied(bodies: list[Body], number: int) -> list[Body]:
    """Takes everything out of a body that is not called any more, and of those that it called."""
    body = bodies[number]
    bodies[number] = replace(body, steps=(), results=())
    for step in body.steps:
        if isinstance(step, Call):
            bodies = _emptied(bodies, step.body)
    return bodies
