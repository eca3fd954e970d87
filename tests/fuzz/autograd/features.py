"""What a program contains, found by looking at it: so that a test can show that everything is generated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import Enum

from rpc.bulk.striping import STRIPED_BYTES
from rpc.wire.chunking import WHOLE_BYTES
from tests.fuzz.autograd.operations import OPERATIONS, Kind, bytes_of_tiles
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
    Style,
    Wait,
)

__all__ = ["Feature", "features"]


class Feature(Enum):
    """What distributed autograd must get right."""

    NESTED_CALL = "a called body calls another worker"
    SENT_TO_SEVERAL = "a tensor is sent to several workers"
    USED_HERE_AND_THERE = "a tensor is sent and also used where it is"
    UNUSED_OUTPUT = "a call's result is not used"
    SHARED_PARAMETER = "a worker's parameter is used by several bodies"
    SEVERAL_ROOTS = "there is more than one root"
    PING_PONG = "calls go back and forth between two workers, six deep"
    NO_GRAD = "an operation runs under no_grad"
    NO_GRAD_CALL = "a call is made under no_grad"
    MATERIALIZED = "a custom function is given zeros for undefined gradients"
    UNMATERIALIZED = "a custom function is given None for undefined gradients"
    TENSOR_HOOK = "a hook on an intermediate tensor"
    LEAF_HOOK = "a hook on a leaf that is used"
    MODULE_HOOK = "a full backward hook on a module that is used"
    RETAINED = "an intermediate tensor retains its gradient"
    SENT_THEN_CHANGED = "a tensor is changed in place after it was sent"
    RECEIVED_CHANGED = "a received tensor is changed in place"
    VIEW = "a view is used"
    RECEIVED_VIEW_CHANGED = "a view of a received tensor is changed in place"
    MULTI_OUTPUT = "an operation with several outputs"
    SPARSE = "an embedding with sparse gradients"
    SPARSE_AND_DENSE = "a parameter with sparse and dense gradients"
    CHECKPOINT = "non-reentrant checkpointing"
    INTEGERS = "a tensor that is not of floating point is sent"
    LARGE = "a tensor of 60 KB or more is sent"
    IN_CHUNKS = "a tensor is sent that takes several frames"
    OVER_STRIPES = "a tensor is sent that goes over several connections, if there are any"
    LARGE_AND_SMALL = "a large and a small tensor are sent in one message"
    LARGE_CROSSING = "a large gradient is sent back"
    SCALAR = "a 0-dim tensor is sent"
    SENT_ON = "a received tensor is sent on untouched"
    RETURNED_UNTOUCHED = "a received tensor is returned untouched"
    LEAF_SENT = "a parameter itself is sent"
    TWICE_IN_A_MESSAGE = "a tensor occurs twice in one message"
    TO_ONESELF = "a worker calls itself"
    KEPT = "a tensor is kept on a worker, for a later call"
    ASYNC = "rpc_async"
    REMOTE = "remote and to_here"
    LOCAL_FETCH = "to_here on the owner"
    REFERENCE_SENT = "a reference to tensors is sent"
    PROXY = "a call through an RRef proxy"
    COROUTINE = "an async def function calls on"
    CONTINUED = "an async_execution function goes on in a callback"
    SECOND_BACKWARD = "a second backward, with retain_graph"
    BACKWARDS_AT_ONCE = "backwards at once in one context"
    CONTEXTS_AT_ONCE = "three contexts at once over the same parameters"
    FORWARD_MEANWHILE = "forwards and backwards run at once in one context"
    REMOTE_ROOT = "the backward begins at a reference to a root on another worker"
    REMOTE_ROOTS_AT_ONCE = "backwards begin on several workers at once, in one context"
    SPARSE_CROSSING = "a sparse gradient is sent back"
    UNDEFINED_CROSSING = "an undefined gradient is sent back"
    CALL_IN_HOOK = "a hook calls another worker"
    CALL_IN_CHECKPOINT = "a checkpointed function calls another worker"


_OF_OPERATIONS = {
    "no_grad": Feature.NO_GRAD,
    "linear": Feature.MATERIALIZED,
    "nonlinear": Feature.MATERIALIZED,
    "two_materialized": Feature.MATERIALIZED,
    "two": Feature.UNMATERIALIZED,
    "half": Feature.UNMATERIALIZED,
    "hook": Feature.TENSOR_HOOK,
    "retain": Feature.RETAINED,
    "view": Feature.VIEW,
    "spread": Feature.VIEW,
    "part": Feature.MULTI_OUTPUT,
    "split": Feature.MULTI_OUTPUT,
    "embed": Feature.SPARSE,
    "checkpoint": Feature.CHECKPOINT,
    "checkpoint_call": Feature.CALL_IN_CHECKPOINT,
    "ask": Feature.CALL_IN_HOOK,
}
_OF_STYLES = {Style.ASYNC: Feature.ASYNC, Style.REMOTE: Feature.REMOTE, Style.PROXY: Feature.PROXY}
_OF_PLANS = {Plan.TWICE: Feature.SECOND_BACKWARD, Plan.AT_ONCE: Feature.BACKWARDS_AT_ONCE}


_OF_KINDS = {Kind.INTEGERS: Feature.INTEGERS, Kind.LARGE: Feature.LARGE, Kind.SCALAR: Feature.SCALAR}


def features(program: Program) -> set[Feature]:
    """All that a program contains."""
    found = {feature for plan, feature in _OF_PLANS.items() if plan is program.plan}
    if len(program.roots) > 1:
        found.add(Feature.SEVERAL_ROOTS)
    if program.runs > 1:
        found.add(Feature.FORWARD_MEANWHILE if program.shared_context else Feature.CONTEXTS_AT_ONCE)
    if program.remote_root:
        found.add(Feature.REMOTE_ROOT)
        if program.plan is Plan.AT_ONCE and len(program.roots) > 1:
            found.add(Feature.REMOTE_ROOTS_AT_ONCE)
    if _crossings(program, 0) >= 6:
        found.add(Feature.PING_PONG)
    inspection = _Inspection(program)
    for number in range(len(program.bodies)):
        found.update(inspection.of_body(number))
    found.update(inspection.of_parameters())
    return found


class _Inspection:
    """Follows the values of each body in the order of its steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.used = Counter(name for names in program.roots for name in names)
        self.kinds: dict[str, Kind] = {}
        self.sizes: dict[str, int] = {}
        for body in program.bodies:
            self.used.update(_uses(body))
            for step in body.steps:
                if isinstance(step, Operation):
                    self.kinds.update(zip(step.outputs, OPERATIONS[step.name].outputs, strict=False))
                    if step.name == "tile":
                        self.sizes[step.outputs[0]] = bytes_of_tiles(step.variant)

    def of_body(self, number: int) -> Iterator[Feature]:
        """What the steps of a body are, and what is done with what."""
        body = self.program.bodies[number]
        sent: defaultdict[str, set[int]] = defaultdict(set)
        received = set(body.parameters)
        base: dict[str, str] = {}
        owners: dict[str, int] = {}
        for step in body.steps:
            match step:
                case Operation():
                    yield from self._of_operation(step, sent, received, base)
                case Call():
                    yield from self._of_call(body, step, received)
                    if number:
                        yield Feature.NESTED_CALL
                    for name in step.inputs:
                        sent[name].add(step.worker)
                    if step.style is Style.REMOTE:
                        owners[step.outputs[0]] = step.worker
                    else:
                        received.update(step.outputs)
                case Wait():
                    received.update(step.outputs)
                case Fetch():
                    received.update(step.outputs)
                    if owners.get(step.reference) == body.worker:
                        yield Feature.LOCAL_FETCH
                    if step.reference in body.parameters:
                        yield Feature.REFERENCE_SENT
                case Keep() if self.used[step.slot]:
                    yield Feature.KEPT
            if isinstance(step, Call | Wait | Fetch) and any(not self.used[name] for name in step.outputs):
                yield Feature.UNUSED_OUTPUT
        yield from self._of_ends(body, sent)

    def _of_ends(self, body: Body, sent: dict[str, set[int]]) -> Iterator[Feature]:
        if any(len(workers) > 1 for workers in sent.values()):
            yield Feature.SENT_TO_SEVERAL
        local = {name for step in body.steps if isinstance(step, Operation) for name in step.inputs}
        if any(name in local and not name.startswith("leaf") for name in sent):
            yield Feature.USED_HERE_AND_THERE
        if set(body.parameters) & set(body.results):
            yield Feature.RETURNED_UNTOUCHED
        if body.manner is Manner.CONTINUED and any(isinstance(step, Wait) for step in body.steps):
            yield Feature.CONTINUED
        if body.manner is Manner.COROUTINE and any(isinstance(step, Call) for step in body.steps):
            yield Feature.COROUTINE

    def _of_operation(
        self, step: Operation, sent: dict[str, set[int]], received: set[str], base: dict[str, str]
    ) -> Iterator[Feature]:
        if step.name in _OF_OPERATIONS:
            yield _OF_OPERATIONS[step.name]
        if step.name == "embed" and step.variant & 1:
            yield Feature.SPARSE_AND_DENSE
        rule, target = OPERATIONS[step.name], step.inputs[0]
        if rule.sparse and target in received:
            yield Feature.SPARSE_CROSSING
        if rule.view:
            base[step.outputs[0]] = base.get(target, target)
        if step.name == "half" and step.inputs[1] in received:
            yield Feature.UNDEFINED_CROSSING
        if rule.inputs[0] is Kind.LARGE and target in received:
            yield Feature.LARGE_CROSSING
        if rule.changes and target in sent:
            yield Feature.SENT_THEN_CHANGED
        if rule.changes and target in received:
            yield Feature.RECEIVED_CHANGED
        if rule.changes and base.get(target) in received:
            yield Feature.RECEIVED_VIEW_CHANGED

    def _of_call(self, body: Body, step: Call, received: set[str]) -> Iterator[Feature]:
        if step.style in _OF_STYLES:
            yield _OF_STYLES[step.style]
        if not step.grad:
            yield Feature.NO_GRAD_CALL
        if step.worker == body.worker:
            yield Feature.TO_ONESELF
        if len(set(step.inputs)) < len(step.inputs):
            yield Feature.TWICE_IN_A_MESSAGE
        if received & set(step.inputs):
            yield Feature.SENT_ON
        for message in (step.inputs, self.program.bodies[step.body].results):
            yield from self._of_message(message)

    def _of_message(self, names: tuple[str, ...]) -> Iterator[Feature]:
        kinds = {self.kinds.get(name) for name in names}
        yield from (_OF_KINDS[kind] for kind in kinds if kind in _OF_KINDS)
        if kinds >= {Kind.LARGE, Kind.MATRIX}:
            yield Feature.LARGE_AND_SMALL
        largest = max((self.sizes.get(name, 0) for name in names), default=0)
        if largest > WHOLE_BYTES:
            yield Feature.IN_CHUNKS
        if largest > STRIPED_BYTES:
            yield Feature.OVER_STRIPES
        if any(name.startswith("leaf") for name in names):
            yield Feature.LEAF_SENT

    def of_parameters(self) -> Iterator[Feature]:
        """Who uses the leaves, modules and embeddings."""
        users: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        for number, body in enumerate(self.program.bodies):
            for step in body.steps:
                if isinstance(step, Operation):
                    for name in (step.name, *step.inputs):
                        users[body.worker, name].add(number)
        parameters = {key: bodies for key, bodies in users.items() if key[1] in _PARAMETERS}
        if any(len(bodies) > 1 for bodies in parameters.values()):
            yield Feature.SHARED_PARAMETER
        for worker, name in parameters:
            seen = name in _HOOKED and (name != "module" or self.program.plan is not Plan.AT_ONCE)
            if worker in self.program.hooked and seen:
                yield _HOOKED[name]


_PARAMETERS = {"module", "embed", *(f"leaf{index}" for index in range(LEAVES))}
_HOOKED = {"leaf0": Feature.LEAF_HOOK, "module": Feature.MODULE_HOOK}


def _crossings(program: Program, number: int, between: frozenset[int] = frozenset()) -> int:
    """How deep calls go back and forth between two workers, from a body on."""
    body = program.bodies[number]
    deepest = 0
    for step in body.steps:
        if isinstance(step, Call) and step.worker != body.worker:
            pair = frozenset((body.worker, step.worker))
            if between in (pair, frozenset()):
                deepest = max(deepest, 1 + _crossings(program, step.body, pair))
    return deepest


def _uses(body: Body) -> Iterator[str]:
    for step in body.steps:
        match step:
            case Operation() | Call():
                yield from step.inputs
            case Keep():
                yield step.value
            case Fetch():
                yield step.reference
    yield from body.results
