"""Random programs: ``generate(seed)`` makes the same one each time, and every one of them is valid.

A body generator follows, for each value, which memory it lies in and whether it requires grad, so that it
changes in place only what PyTorch allows to change, and what no concurrent body may see: a program has one
meaning, whatever runs first.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.fuzz.autograd.drafts import Draft, Memory, Pending, Slots, Value
from tests.fuzz.autograd.operations import OPERATIONS, Kind, Rule
from tests.fuzz.autograd.program import (
    LEAVES,
    Body,
    Call,
    Fetch,
    Keep,
    Manner,
    Operation,
    Plan,
    Program,
    Step,
    Style,
    Wait,
)

_VOLLEY = 6
"""So often a ball crosses the net in a ping-pong."""


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


class BodyGenerator:
    """Makes one body."""

    def __init__(
        self,
        program: Draft,
        worker: int,
        parameters: list[Value],
        manner: Manner,
        depth: int,
        slots: Slots,
        grad: bool = True,
    ) -> None:
        self.program = program
        self.random = program.random
        self.worker = worker
        self.manner = manner
        self.grad = grad
        self._depth = depth
        self._number = len(program.bodies)
        program.bodies.append(None)
        self._slots = slots
        self._parameters = tuple(parameter.name for parameter in parameters)
        self._values = list(parameters)
        self._steps: list[Step] = []
        self._waiting: dict[int, Pending] = {}
        self._created: dict[str, Pending] = {}
        self._used: set[str] = set()
        self._continued = False
        self._leaves = [
            Value(f"leaf{index}", Kind.MATRIX, Memory(True, True), (worker, index), table=index > 0)
            for index in range(LEAVES)
        ]

    # ---- whole bodies

    def normal(self, count: int) -> list[Value]:
        """Make about ``steps`` random steps; returns the results."""
        self._unload(self._values)
        self.wander(count)
        return self.finish(self._cargo(self.random.randint(1, 4)))

    def relay(self, hops: int) -> list[Value]:
        """Sends the parameters on as they came, and returns what comes back as it came."""
        everything = list(self._values)
        if hops:
            everything = self._call_body("relay", self._anyone(), everything, Style.SYNC, hops - 1)
        return self.finish(everything)

    def volley(self, partner: int, left: int) -> list[Value]:
        """Plays the ball back to ``partner``; it comes back from there when it has crossed so often."""
        self._operate()
        if left:
            ball = [self._pick(Kind.MATRIX) for _ in range(2)]
            self._values += self._call_body("volley", partner, ball, Style.SYNC, left - 1)
            self._operate()
        return self.finish([self._pick(Kind.MATRIX), self._values[-1]])

    def wander(self, count: int, calls: float = 0.35) -> None:
        """Make random steps, of which this share are calls."""
        for _ in range(count):
            chance = self.random.random()
            if chance < calls and self._may_call():
                self._call()
            elif chance < calls + 0.1 and (self._waiting or self._created):
                self._complete_one()
            elif chance < calls + 0.15 and self.manner is Manner.PLAIN and self._references():
                self._fetch(self.random.choice(self._references()))
            elif chance < calls + 0.23 and self.grad and self._matrices():
                self._keep()
            else:
                self._operate()

    def root(self) -> tuple[str, ...]:
        """Some values of which a root is the sum; at least one requires grad."""
        some = [self._pick(Kind.MATRIX) for _ in range(self.random.randint(1, 4))]
        some.append(self._pick(Kind.MATRIX, needs_grad=True))
        return tuple(value.name for value in some)

    def finish(self, results: list[Value]) -> list[Value]:
        """Ends the body."""
        while self._waiting or self._created:
            self._complete_one()
        self.program.bodies[self._number] = Body(
            self.worker,
            self.manner,
            self._parameters,
            tuple(self._steps),
            tuple(result.name for result in results),
        )
        return results

    # ---- local steps

    def _operate(self) -> None:
        name = self.random.choice(self.program.operations)
        while not self._possible(OPERATIONS[name]):
            name = self.random.choice(self.program.operations)
        rule = OPERATIONS[name]
        if rule.changes:
            self._do(name, self._target())
        elif rule.sparse:
            self._do(name, self.random.choice(self._tables()))
        else:
            self._do(name, self._pick(rule.inputs[0], rule.needs_grad))

    def _disturb(self, values: list[Value]) -> None:
        """Changes in place one of the values that have just been sent or received, or a view of it."""
        targets = [value for value in values if value in self._targets()]
        if targets:
            target = self.random.choice(targets)
            if self.random.random() < 0.5:
                self._do("view", target)
                target = self._values[-1]
            self._do("change", target)

    def _do(self, name: str, first: Value) -> None:
        rule = OPERATIONS[name]
        inputs = [first]
        for kind in rule.inputs[1:]:
            other = self._pick(kind)
            if rule.changes and other.memory is first.memory:
                other = self.random.choice(self._leaves)
            inputs.append(other)
        outputs = self._outputs(rule, inputs)
        self._steps.append(
            Operation(
                self.program.number(),
                name,
                tuple(value.name for value in inputs),
                tuple(value.name for value in outputs),
                self.random.randrange(12),
            )
        )
        self._values += outputs

    def _possible(self, rule: Rule) -> bool:
        if rule.changes:
            return bool(self._targets())
        if rule.calls and self.manner is not Manner.PLAIN:
            return False
        there = {value.kind for value in self._values} | {Kind.MATRIX}
        return there.issuperset(rule.inputs)

    def _outputs(self, rule: Rule, inputs: list[Value]) -> list[Value]:
        first = inputs[0]
        sources = [first] if rule.cuts_others else inputs
        requires_grad = rule.own_parameters or any(value.memory.requires_grad for value in sources)
        if rule.changes:
            first.memory.requires_grad = requires_grad
            first.memory.changed = True
        for value in inputs:
            value.memory.frozen |= rule.saves
        if rule.view:
            name = self.program.name()
            final, overlaps = rule.final or first.final, rule.overlaps or first.overlaps
            return [Value(name, Kind.MATRIX, first.memory, final=final, overlaps=overlaps)]
        return [
            Value(
                self.program.name(),
                kind,
                Memory(requires_grad and not rule.cuts and kind is not Kind.INTEGERS),
                final=rule.final,
            )
            for kind in rule.outputs
        ]

    def _keep(self) -> None:
        value = self.random.choice(self._matrices())
        value.memory.kept = True
        slot = self.program.same(value, f"slot{self.program.name()}")
        self._slots.setdefault(self.worker, []).append(slot)
        self._steps.append(Keep(self.program.number(), value.name, slot.name))

    def _unload(self, received: Sequence[Value]) -> None:
        """Uses what is large of that, so that its gradient goes back."""
        for value in [value for value in received if value.kind is Kind.LARGE]:
            if self.random.random() < 0.7:
                self._do(self.random.choice(("cut", "fold")), value)

    # ---- calls

    def _call(self) -> None:
        random = self.random
        values = self._cargo(random.randint(1, 3))
        if random.random() < 0.2:
            values.append(values[0])
        if random.random() < 0.4:
            values += self._references()[-1:]
        what = random.choice(("normal",) * 8 + ("relay",) * 2)
        style = random.choice((Style.SYNC, *Style)) if self.manner is Manner.PLAIN else Style.ASYNC
        worker = self._anyone()
        if self._number == 0 and random.random() < 0.1:
            what, style = "volley", Style.SYNC
            worker = (self.worker + 1) % self.program.workers
        grad = not (what == "normal" and style is Style.SYNC and random.random() < 0.15)
        if not grad:
            values = [value for value in values if value.kind is not Kind.REFERENCE]
        size = {"normal": random.randint(1, 4), "relay": random.randint(0, 2), "volley": _VOLLEY - 1}[what]
        received = self._call_body(what, worker, values, style, size, grad)
        self._values += received
        self._unload(received)
        if random.random() < 0.4:
            self._disturb(values + received)

    def _call_body(
        self, what: str, worker: int, values: list[Value], style: Style, size: int, grad: bool = True
    ) -> list[Value]:
        """Makes a body and the call of it; what the caller has from it at once."""
        program = self.program
        number = program.number()
        waits = style in (Style.ASYNC, Style.REMOTE)
        program.pending += waits
        slots = {at: list(kept) for at, kept in self._slots.items()} if waits else self._slots
        parameters = program.copies(values, grad)
        plain = what != "normal" or style is Style.PROXY or not grad
        manner = Manner.PLAIN if plain else self.random.choice((Manner.PLAIN, *Manner))
        callee = BodyGenerator(program, worker, parameters, manner, self._depth - 1, slots, grad)
        if what == "relay":
            results = callee.relay(size)
        elif what == "volley":
            results = callee.volley(self.worker, size)
        else:
            results = callee.normal(size)
        outputs: list[Value] = []
        match style:
            case Style.ASYNC:
                self._waiting[number] = Pending(results, slots)
            case Style.REMOTE:
                for result in results:
                    result.memory.frozen = True
                reference = Value(
                    program.name(), Kind.REFERENCE, Memory(), owner=worker, target=tuple(results)
                )
                self._created[reference.name] = Pending(results, slots)
                outputs = [reference]
            case _:
                outputs = program.copies(results, grad)
        inputs, made = (tuple(value.name for value in some) for some in (values, outputs))
        self._steps.append(Call(number, worker, callee._number, style, inputs, made, grad))
        return outputs

    def _complete_one(self) -> None:
        """Waits for a call that may still run."""
        if self._waiting and (not self._created or self.random.random() < 0.5):
            number = self.random.choice(list(self._waiting))
            pending = self._waiting.pop(number)
            self._continued = self.manner is Manner.CONTINUED
            outputs = self.program.copies(pending.results, grad=True)
            names = tuple(value.name for value in outputs)
            self._steps.append(Wait(self.program.number(), number, names))
            self._values += outputs
            self._unload(outputs)
            self._completed(pending)
        else:
            name = self.random.choice(list(self._created))
            self._fetch(next(value for value in self._values if value.name == name))

    def _fetch(self, reference: Value) -> None:
        if reference.owner == self.worker:  # the objects themselves
            outputs = [self.program.same(value, self.program.name()) for value in reference.target]
        else:
            outputs = self.program.copies(reference.target, grad=True)
        names = tuple(value.name for value in outputs)
        self._steps.append(Fetch(self.program.number(), reference.name, names))
        self._values += outputs
        self._unload(outputs)
        if pending := self._created.pop(reference.name, None):
            self._completed(pending)

    def _completed(self, pending: Pending) -> None:
        self.program.pending -= 1
        for worker, kept in pending.slots.items():
            mine = self._slots.setdefault(worker, [])
            mine += [slot for slot in kept if slot not in mine]

    # ---- choices

    def _may_call(self) -> bool:
        return self._depth > 0 and self.program.budget > 0 and self.grad and not self._continued

    def _anyone(self) -> int:
        """Most often another worker."""
        others = [worker for worker in range(self.program.workers) if worker != self.worker]
        return self.worker if self.random.random() < 0.15 else self.random.choice(others)

    def _matrices(self) -> list[Value]:
        return [value for value in self._values if value.kind is Kind.MATRIX]

    def _references(self) -> list[Value]:
        return [value for value in self._values if value.kind is Kind.REFERENCE]

    def _kept(self) -> list[Value]:
        return self._slots.get(self.worker, [])

    def _targets(self) -> list[Value]:
        """What may be changed in place."""
        return [
            value
            for value in self._matrices() + self._kept()
            if not (value.memory.frozen or value.final or (value.memory.kept and self.program.pending))
        ]

    def _tables(self) -> list[Value]:
        """What may get a sparse gradient: if there are any, some that were received."""
        received = [value for value in self._matrices() if value.table and not value.memory.changed]
        return received or [leaf for leaf in self._leaves if leaf.table]

    def _target(self) -> Value:
        return self.random.choice(self._targets())

    def _pick(self, kind: Kind, needs_grad: bool = False) -> Value:
        """An input: most often something made here, of late."""
        if kind is not Kind.MATRIX:
            return self.random.choice([value for value in self._values if value.kind is kind])
        recent = self._matrices()[-6:]
        unused = [value for value in self._matrices() if value.name not in self._used]
        sources = [(unused, 0.5), (recent, 0.65), (self._kept(), 0.3), (self._leaves, 1.0)]
        for values, chance in sources:
            fit = [value for value in values if value.memory.requires_grad or not needs_grad]
            if fit and self.random.random() < chance:
                choice = self.random.choice(fit)
                self._used.add(choice.name)
                return choice
        raise AssertionError("leaves always fit")

    def _cargo(self, count: int) -> list[Value]:
        """What is sent in one message: so many values, of which one may have been made large for it."""
        values = [self._pick_any() for _ in range(count)]
        if self.program.large and self.random.random() < 0.5:
            self._do("tile", self._pick(Kind.MATRIX, needs_grad=True))
            values[self.random.randrange(count)] = self._values[-1]
        return values

    def _pick_any(self) -> Value:
        """Anything that can be sent, but references."""
        others = [value for value in self._values if value.kind not in (Kind.MATRIX, Kind.REFERENCE)]
        if others and self.random.random() < 0.3:
            return self.random.choice(others)
        return self._pick(Kind.MATRIX)
