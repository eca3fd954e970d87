"""The random programs themselves: they are reproducible, valid and contain everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rpc.transport.write_queue import STREAMED_BYTES
from rpc.wire.chunking import WHOLE_BYTES
from tests.fuzz.autograd.generation import generate
from tests.fuzz.autograd.observations import mismatches
from tests.fuzz.autograd.operations import OPERATIONS, Kind, bytes_of_tiles
from tests.fuzz.autograd.program import (
    Body,
    Call,
    Fetch,
    Manner,
    Numbers,
    Operation,
    Plan,
    Program,
    Style,
    Wait,
)
from tests.fuzz.autograd.reference import run_in_one_process
from tests.fuzz.autograd.session import QUICK_SEEDS

EVERYTHING = {
    *OPERATIONS,
    *Style,
    *Manner,
    *Plan,
    *Numbers,
    *Kind,
    *(
        "runs in one context",
        "a step",
        "runs in contexts of their own",
        "remote root",
        "several roots",
        "leaves hooked",
    ),
    *(
        "nested",
        "to oneself",
        "under no_grad",
        "sent on",
        "twice in a message",
        "a leaf",
        "chunks",
        "stripes",
    ),
    *("sent, changed", "received, changed", "received, view changed", "received, large", "received, sparse"),
}


def test_a_seed_gives_one_program_and_another_seed_another() -> None:
    shown = [str(generate(seed)) for seed in range(50)]
    assert [str(generate(seed)) for seed in range(50)] == shown
    assert len(set(shown)) == 50


def test_everything_is_in_the_programs_of_the_quick_run_and_in_many_of_a_thousand() -> None:
    quick = {what for seed in QUICK_SEEDS for what in contents(generate(seed))}
    assert not EVERYTHING - quick
    counts = Counter(what for seed in range(1000) for what in set(contents(generate(seed))))
    assert min(counts.values()) >= 15


def contents(program: Program) -> Iterator[Any]:
    """What a program contains."""
    yield from (program.numbers, program.plan)
    if program.runs > 1:
        yield "runs in one context" if program.shared_context else "runs in contexts of their own"
    yield from ["remote root"] * program.remote_root + ["several roots"] * (len(program.roots) > 1)
    yield from ["leaves hooked"] * bool(program.hooked) + ["a step"] * program.steps
    sizes = {
        step.outputs[0]: bytes_of_tiles(step.variant)
        for body in program.bodies
        for step in body.steps
        if isinstance(step, Operation) and step.name == "tile"
    }
    for number, body in enumerate(program.bodies):
        yield body.manner
        yield from ["nested"] * (number > 0 and any(isinstance(step, Call) for step in body.steps))
        yield from contents_of_body(body, sizes)


def contents_of_body(body: Body, sizes: dict[str, int]) -> Iterator[Any]:
    sent, received, base = set[str](), set(body.parameters), dict[str, str]()
    kinds: dict[str, Kind] = {}
    for step in body.steps:
        match step:
            case Operation():
                rule, target = OPERATIONS[step.name], step.inputs[0]
                yield from (step.name, *rule.inputs)
                kinds.update(zip(step.outputs, rule.outputs, strict=False))
                if rule.view:
                    base[step.outputs[0]] = base.get(target, target)
                for is_so, what in (
                    (rule.changes and target in sent, "sent, changed"),
                    (rule.changes and target in received, "received, changed"),
                    (rule.changes and base.get(target) in received, "received, view changed"),
                    (rule.inputs[0] is Kind.LARGE and target in received, "received, large"),
                    (rule.sparse and target in received, "received, sparse"),
                ):
                    yield from [what] * is_so
            case Call():
                yield step.style
                yield from [Kind.REFERENCE] * (step.style is Style.REMOTE)
                yield from (("sent", kinds[name]) for name in step.inputs if name in kinds)
                largest = max((sizes.get(name, 0) for name in step.inputs), default=0)
                for is_so, what in (
                    (step.worker == body.worker, "to oneself"),
                    (not step.grad, "under no_grad"),
                    (bool(received.intersection(step.inputs)), "sent on"),
                    (len(set(step.inputs)) < len(step.inputs), "twice in a message"),
                    (any(name.startswith("leaf") for name in step.inputs), "a leaf"),
                    (largest > WHOLE_BYTES, "chunks"),
                    (largest > STREAMED_BYTES, "stripes"),
                ):
                    yield from [what] * is_so
                sent.update(step.inputs)
                received.update(step.outputs)
            case Wait() | Fetch():
                received.update(step.outputs)


def test_programs_are_valid_repeatable_to_the_bit_and_most_send_gradients_back() -> None:
    arrivals = []
    for seed in range(100):
        program = generate(seed)
        once, twice = run_in_one_process(program), run_in_one_process(program)
        for one, other in zip(once, twice, strict=True):
            assert mismatches(one, other, exact=True) == []
        arrivals.append(sum(once[0].arrivals.values()))
    assert sum(count > 0 for count in arrivals) > 70


def test_a_program_is_shown_with_all_its_steps() -> None:
    program = generate(3)
    assert all(str(step) in str(program) for body in program.bodies for step in body.steps)
