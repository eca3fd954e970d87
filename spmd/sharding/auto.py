"""``use_spmd(auto=True)``: shardings chosen by cost, where the program specifies none.

The first program in which parameters change, an optimizer's step, runs as it is recorded. Then layouts of its
inputs are searched for, with the user's marks fixed, and the tensors that outlive it are laid out as they
would be at the end of that program with these inputs. Later recordings follow from the tensors' layouts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spmd.engine.auto.cost import local_bytes
from spmd.engine.auto.search import Chosen, choose_layouts
from spmd.engine.driver.aliases import Alias
from spmd.engine.driver.blocks import has_blocks
from spmd.engine.driver.building import build
from spmd.engine.driver.current import engine
from spmd.engine.driver.logical_tensor import LogicalTensor
from spmd.engine.driver.recorder import LIMIT, Recording
from spmd.engine.driver.session import Session
from spmd.engine.program.program import REDISTRIBUTE, Layout, MeshKey, Program, Ref
from spmd.sharding.distribute import mesh_of
from spmd.sharding.marks import mark_of
from spmd.sharding.mesh import Mesh, get_1d_mesh, get_global_mesh
from spmd.sharding.op_sharding import OpSharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AutoPlan", "AutoPlanLine", "Planner", "auto_plan", "auto_policy", "choose"]

_LIMIT: Final = 20 * LIMIT
"""Maximum number of instructions of a first step that is planned as one program."""


@dataclass(frozen=True, slots=True)
class AutoPlanLine:
    """One input of the program.

    Attributes:
        shape: shape of the whole tensor.
        sharding: sharding, in the format of ``t.sharding_spec``.
        kind: ``"changed"`` by the program, as parameters are; or ``"read"``.
        fixed: whether it was not moved: the user has marked it, or it was sharded already.
        bytes_before, bytes_after: bytes of it on the worker with the largest part.
    """

    shape: tuple[int, ...]
    sharding: str
    kind: str
    fixed: bool
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """The result of ``spmd.auto_plan()``: the shardings that were chosen. Printed, it is a table.

    Attributes:
        lines: one for each input with dimensions, in the order of first use.
        sent_before, sent_after: bytes that a worker sends in the program according to the cost model, with
            inputs as they were marked and replicated otherwise, and as chosen.
        held_before, held_after: bytes of all inputs that a worker holds.
        evaluations: number of plans that were evaluated.
    """

    lines: tuple[AutoPlanLine, ...]
    sent_before: float
    sent_after: float
    held_before: float
    held_after: float
    evaluations: int

    def __str__(self) -> str:
        rows = [
            f"{list(each.shape)} {each.kind}: {each.sharding}{', as it was' if each.fixed else ''}, "
            f"{each.bytes_before} to {each.bytes_after} bytes"
            for each in self.lines
        ]
        totals = (
            f"held by a worker: {self.held_before / 1e6:.3f} to {self.held_after / 1e6:.3f} MB; "
            f"sent by a worker: {self.sent_before / 1e6:.3f} to {self.sent_after / 1e6:.3f} MB; "
            f"{self.evaluations} plans looked at"
        )
        return "\n".join([*rows, totals])


def auto_plan() -> AutoPlan | None:
    """Return the shardings that ``use_spmd(auto=True)`` has chosen; None if it has not chosen any yet.

    Raises:
        NotInSpmdModeError: SPMD mode is off.

    Example::

        print(spmd.auto_plan())
    """
    planner = engine().planner
    return planner.plan if isinstance(planner, Planner) else None


def choose(mesh: Mesh | None = None) -> None:
    """Choose shardings from here on, as ``use_spmd(auto=True)`` does; a second call has no effect.

    Args:
        mesh: mesh to shard over; None for the global mesh, or if there is none, all workers along one axis.

    Raises:
        NotInSpmdModeError: SPMD mode is off.
    """
    session = engine()
    if session.planner is None:
        session.recorder.flush()
        session.planner = Planner(session, mesh)


def auto_policy(name: str, module: object, mesh: Mesh | DeviceMesh) -> None:
    """A ``partition_fn`` for :func:`spmd.distribute_module` that leaves the choice to the cost model.

    Example::

        model = spmd.distribute_module(model, mesh, spmd.auto_policy)
    """
    choose(mesh_of(mesh))


class Planner:
    """Chooses layouts once for a session, which calls it with each recording, under the recorder's lock.

    Attributes:
        plan: the plan, once it is chosen.
    """

    def __init__(self, session: Session, mesh: Mesh | None = None) -> None:
        self.plan: AutoPlan | None = None
        self._mesh = mesh
        self._recorder = session.recorder
        with self._recorder.lock:
            self._recorder.changes = {}
            self._recorder.limit = _LIMIT

    def __call__(self, recording: Recording) -> Callable[[], None] | None:
        """Return the function to call once a recording has run, or None."""
        changes = self._recorder.changes
        if not changes:  # or no longer: there is a plan
            return None
        self._recorder.changes = {}
        if len(recording.positions) >= self._recorder.limit:  # in the middle of an operation
            return None
        origins = _origins(changes)
        aliases, tensors = _alive()
        if not any(
            each.requires_grad and each.is_leaf and _index(each._alias, recording) in origins
            for each in tensors
        ):
            return None
        self._recorder.changes, self._recorder.limit = None, LIMIT
        return _Study(recording, origins, aliases, tensors, self._mesh, self._apply).run

    def _apply(
        self, plan: AutoPlan, layouts: list[tuple[Alias, Layout]], cuts: dict[tuple[object, ...], Layout]
    ) -> None:
        self.plan = plan
        self._recorder.cuts = cuts
        for alias, layout in layouts:
            assert alias.value is not None
            value = self._recorder.moved(alias.value, layout)
            alias.value, alias.spec = value, alias.spec.laid_out(layout)


class _Study:
    """A recording, with what is known of its values before it runs."""

    def __init__(
        self,
        recording: Recording,
        origins: dict[int, int],
        aliases: list[Alias],
        tensors: list[LogicalTensor],
        mesh: Mesh | None,
        apply: Callable[[AutoPlan, list[tuple[Alias, Layout]], dict[tuple[object, ...], Layout]], None],
    ) -> None:
        self._apply, self._mesh = apply, mesh
        specs = [value.spec for value in recording.inputs]
        self._uploads = {place for place, value in enumerate(recording.inputs) if value.data is not None}
        alive = [
            number for number, each in enumerate(recording.made) if each is not None and each() is not None
        ]
        self._program, _ = build(specs, (), recording.operations, alive, recording.default_dtype)
        numbers = dict(zip(alive, self._program.outputs, strict=True))
        numbers |= {-1 - place: place for place in range(len(specs))}
        self._updates = {
            -1 - origin: numbers[number]
            for number, origin in origins.items()
            if number in numbers and origin < 0
        }
        marked = {id(each._alias) for each in tensors if mark_of(each) is not None}
        self._marked: set[int] = set()
        self._live: list[tuple[Alias, int]] = []
        for alias in aliases:
            index = _index(alias, recording)
            if index is None or index not in numbers:
                continue
            if id(alias) not in marked:
                self._live.append((alias, numbers[index]))
            elif (origin := origins.get(index, index)) < 0:
                self._marked.add(-1 - origin)

    def run(self) -> None:
        """Choose, and lay out."""
        program = self._program
        mesh = self._mesh or get_global_mesh()
        if mesh is None or mesh.size() != engine().workers:  # it may be of an earlier session
            mesh = get_1d_mesh()
        key = MeshKey(tuple(map(int, mesh.device_ids)), tuple(mesh.mesh_shape))
        own = _taken_as_they_are(program) | self._marked
        own |= {place for place, meta in enumerate(program.inputs) if meta.layout.mesh is not None}
        fixed = {place: program.inputs[place].layout for place in own}
        found = choose_layouts(program, key, fixed, self._updates)
        layouts = list(found.values)
        for place, number in self._updates.items():
            layouts[number] = found.layouts[place]
        cuts: dict[tuple[object, ...], Layout] = {}
        for place in sorted(self._uploads - self._updates.keys() - own):
            meta = program.inputs[place]
            if meta.shape:
                cuts.setdefault((meta.shape, meta.dtype), found.layouts[place])
        live = [(alias, layouts[number]) for alias, number in self._live if has_blocks(layouts[number])]
        self._apply(_plan_of(program, found, self._updates.keys(), own), live, cuts)


def _plan_of(program: Program, found: Chosen, changed: Collection[int], own: set[int]) -> AutoPlan:
    lines = []
    for place, (meta, layout) in enumerate(zip(program.inputs, found.layouts, strict=True)):
        if meta.shape:
            sharding = OpSharding.of_layout(layout, len(meta.shape))
            before, after = local_bytes(meta), local_bytes(replace(meta, layout=layout))
            kind = "changed" if place in changed else "read"
            lines.append(AutoPlanLine(meta.shape, str(sharding), kind, place in own, before, after))
    whole, cost = found.whole, found.cost
    return AutoPlan(tuple(lines), whole.wire, cost.wire, whole.held, cost.held, found.evaluations)


def _taken_as_they_are(program: Program) -> set[int]:
    """Inputs of our own instructions, which have no rules: where these expect them is part of the program."""
    return {
        arg.index
        for each in program.instructions
        if each.operator.startswith("spmd::") and each.operator != REDISTRIBUTE
        for arg in each.args
        if isinstance(arg, Ref) and arg.index < len(program.inputs)
    }


def _origins(changes: dict[int, int]) -> dict[int, int]:
    """Return, for each value that a change has made, the one before all changes."""
    found: dict[int, int] = {}
    for before, after in changes.items():  # in the order in which they came
        found[after] = found.get(before, before)
    return found


def _index(alias: Alias, recording: Recording) -> int | None:
    """The number of a tensor's value in a recording; None if it is not of it, or for a view."""
    value = alias.value
    if alias.base is not None or value is None or value.recording is not recording:
        return None
    return value.index


def _alive() -> tuple[list[Alias], list[LogicalTensor]]:
    """Return the aliases of all living tensors, and the tensors, which only the garbage collector lists."""
    objects = gc.get_objects()
    return (
        [each for each in objects if type(each) is Alias],
        [each for each in objects if issubclass(type(each), LogicalTensor)],
    )
