"""``deserialization="safe"`` between workers: what is allowed works, anything else is refused by name."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.agent import gather as gather_rounds
from rpc.errors import ProtocolError, RemoteError, RpcError, RpcTimeoutError, SerializationError
from rpc.group.workers import Member
from rpc.runtime.current import current_agent
from rpc.serialization import neutral as neutral_codec
from rpc.serialization.codecs import NEUTRAL, PICKLE
from rpc.serialization.pickler import Reducers
from rpc.wire.frames import Kind
from tests.support import backend
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.refusals import refused
from tests.support.serving import in_group, serve
from tests.support.streams import until
from tests.support.workers import RunWorkers, Task, Worker

SAFE: dict[str, Any] = {"deserialization": "safe"}

ran: list[str] = []
"""What hostile pickles have made this process run."""


@rpc.allow_function
def add(left: Any, right: Any = 1) -> Any:
    return left + right


@rpc.allow_function
def add_nothing(value: Any) -> Any:
    return value


@rpc.allow_function
async def add_slowly(left: int) -> int:
    return left + 1


@rpc.allow_function
@rpc.functions.async_execution
def promise(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class Secret:
    """Of a class that nobody allows; its methods may be called where it lives."""

    def __init__(self, value: int) -> None:
        self.value = value

    def look(self) -> int:
        return self.value

    def _peek(self) -> int:
        return self.value

    def __call__(self) -> int:
        return self.value

    def tell_all(self) -> str:
        return "secrets"


rpc.allow_methods(Secret, "look", "__call__")


@rpc.allow_class
class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def grow(self) -> None:
        self.x += 1

    def shrink(self) -> int:
        return self.x - 1


rpc.allow_methods(Point, "shrink")


@rpc.allow_class
class Trap:
    """Its instances may arrive; that they may be called, nobody has said."""

    def __call__(self) -> str:
        return run("by an instance")


@rpc.allow_function
def make_secret(value: int) -> Secret:
    return Secret(value)


@rpc.allow_function
def give_array() -> Any:
    return torch.ones(3).numpy()


@rpc.allow_function
def give_storage() -> Any:
    return torch.ones(3).untyped_storage()


@rpc.allow_function
def double(point: Point) -> Point:
    return Point(2 * point.x)


class SecretError(Exception):
    pass


@rpc.allow_function
def fail(kind: str) -> None:
    raise {"known": KeyError("key"), "unknown": SecretError("text")}[kind]


@rpc.allow_function
def look_through(rref: rpc.RRef[Secret]) -> int:
    return int(rref.rpc_sync().look())


def run(what: str) -> str:
    ran.append(what)
    return what


@rpc.allow_function
def what_ran() -> list[str]:
    return ran


class Hostility:
    """Pickles as a call of ``run``."""

    def __reduce__(self) -> Any:
        return run, ("by a pickle",)


@rpc.allow_function
def answer_with_hostility() -> Any:
    return Hostility()


@rpc.allow_function
def say_target() -> list[Any]:
    at = target()
    return [at.member.to_wire(), at.group]


def serve_safely(worker: Worker) -> None:
    """Of this module, so that it is imported where it runs: nothing is imported to answer a call."""
    serve(worker, **SAFE)


def first_of_safe(run_workers: RunWorkers, task: Task, world_size: int = 2) -> Any:
    return run_workers([in_group(task, **SAFE), *[serve_safely] * (world_size - 1)])[0]


# ---- what is allowed


def use_what_is_allowed(_: Worker) -> list[Any]:
    tensor = torch.arange(3.0)
    secret = rpc.remote("worker1", make_secret, args=(7,))
    return [
        rpc.rpc_sync("worker1", add, args=(1,)),
        rpc.rpc_async("worker1", add, args=([1, {"a": (2, None)}], [b"x"])).wait(),
        rpc.rpc_sync("worker1", add, args=(tensor,), kwargs={"right": tensor}).tolist(),
        rpc.rpc_sync("worker1", add_slowly, args=(1,)),
        rpc.rpc_sync("worker1", promise, args=("kept",)),
        rpc.rpc_sync("worker1", double, args=(Point(3),)).x,
        rpc.rpc_sync("worker1", Point, args=(4,)).x,
        secret.rpc_sync().look(),
        secret.rpc_async().look().wait(),
        secret.rpc_sync().__call__(),
        rpc.rpc_sync("worker2", look_through, args=(secret,)),
    ]


def test_what_is_allowed_works(run_workers: RunWorkers) -> None:
    values = first_of_safe(run_workers, use_what_is_allowed, world_size=3)
    assert values == [2, [1, {"a": (2, None)}, b"x"], [0, 2, 4], 2, "kept", 6, 4, 7, 7, 7, 7]


def gather(worker: Worker) -> Any:
    with worker.group(**SAFE):
        rpc.barrier()
        return rpc.all_gather({worker.rank: torch.ones(2)})["worker1"][1].tolist()


def test_gathering_works(run_workers: RunWorkers) -> None:
    assert run_workers(gather, 2) == [[1, 1]] * 2


def gather_in_vain(worker: Worker) -> str:
    """Of three, the last does not come, and the first does not wait for long."""
    with worker.group(**SAFE):
        told = ""
        if worker.rank == 0:
            names = ("worker0", "worker1", "worker2")
            until(lambda: current_agent().gathering.missing(names, 0) == ["worker0", "worker2"])
        if worker.rank < 2:
            with pytest.raises(RpcTimeoutError) as caught:
                rpc.barrier(timeout=0.5 if worker.rank == 0 else 0)
            told = str(caught.value)
        rpc.barrier({"worker0", "worker1"})  # so that it is not their leaving that is told
        return told


def test_who_gathers_in_vain_is_told(run_workers: RunWorkers) -> None:
    first, second, _ = run_workers([gather_in_vain, gather_in_vain, serve_safely])
    assert first == second
    assert "'worker0' timed out in _all_gather after 0.50 seconds, waiting for ['worker2']" in second


def join_late(worker: Worker) -> Any:
    with worker.group(dynamic=True, **SAFE):
        worker.report("ready")
        if worker.rank == 0:
            worker.wait_for("leave")
            return None
        return rpc.rpc_sync("worker0", add, args=(1,))


def test_dynamic_groups_work(run_workers: RunWorkers) -> None:
    workers = run_workers.start(join_late, 1)
    workers[0].wait_for("ready")
    assert workers.add(join_late).result() == 2
    workers[0].tell("leave")
    workers.results()


# ---- what is not


def use_what_is_not_allowed(_: Worker) -> list[str]:
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (run, ("by a call",), f"{__name__}.run"),
        (os.system, ("touch ran",), "posix.system"),
        (torch.add, (1, 1), "torch.add"),
        (lambda: run("by a lambda"), (), "cloudpickle.cloudpickle."),
        (Secret, (1,), f"{__name__}.Secret"),
        (add, (Hostility(),), f"{__name__}.run"),
        (add, ([1, {"a": Secret(1)}],), f"{__name__}.Secret"),
        (add, (run,), f"{__name__}.run"),
    ]
    for function, args, name in cases:
        text = rf"^'{name}\S*' is not on .* allow-list"
        refused(SerializationError, text, rpc.rpc_sync, "worker1", function, args)
        refused(SerializationError, text, rpc.rpc_async("worker1", function, args).wait)
        refused(SerializationError, text, rpc.remote("worker1", function, args).to_here)
    secret = rpc.remote("worker1", make_secret, args=(7,))
    refused(SerializationError, f"'{__name__}.Secret' is not on", secret.to_here)
    refused(SerializationError, f"'{__name__}.Secret' is not on", secret.remote().look)
    for method in ("_peek", "tell_all"):
        text = f"^the method '{method}' of objects of type '{__name__}.Secret' is not on"
        refused(SerializationError, text, getattr(secret.rpc_sync(), method))
    point = rpc.remote("worker1", Point, args=(7,))
    text = f"^the method 'grow' of objects of type '{__name__}.Point' is not on"
    refused(SerializationError, text, point.remote().grow().to_here)
    refused(SerializationError, f"'{__name__}.run' is not on", rpc.rpc_sync, "worker1", answer_with_hostility)
    refused(KeyError, "key", rpc.rpc_sync, "worker1", fail, ("known",))
    unknown = (
        f"{__name__}.SecretError, raised by worker 'worker1': text\n.*'{__name__}.SecretError' is not on"
    )
    refused(RemoteError, unknown, rpc.rpc_sync, "worker1", fail, ("unknown",))
    return [*ran, *rpc.rpc_sync("worker1", what_ran)]


def test_what_is_not_allowed_is_named_and_nothing_runs(run_workers: RunWorkers) -> None:
    assert first_of_safe(run_workers, use_what_is_not_allowed) == []


def reach_through_references(worker: Worker) -> list[str]:
    """What a tensor, an array or a list would give to those who refer to it."""
    tensor = rpc.remote("worker1", add, args=(torch.ones(3),))
    path = str(worker.folder / "written")
    assert tensor.rpc_sync().size() == (3,)
    assert tensor.rpc_sync().tolist() == [2, 2, 2]
    assert tensor.rpc_async().clone().wait().tolist() == [2, 2, 2]
    for method, args in (
        ("numpy", ()),
        ("untyped_storage", ()),
        ("storage", ()),
        ("apply_", (add,)),
        ("fill_", (0,)),
        ("set_", (torch.zeros(9),)),
        ("register_hook", (add,)),
        ("share_memory_", ()),
        ("to", ("cpu",)),
    ):
        text = f"^the method '{method}' of objects of type 'torch.Tensor' is not on .* rpc.allow_methods"
        refused(SerializationError, text, getattr(tensor.rpc_sync(), method), *args)
    point = Point(2)
    assert rpc.remote("worker1", add_nothing, args=(point,)).rpc_sync().shrink() == 1
    point.shrink = Trap()  # type: ignore[assignment, method-assign]
    text = f"^'shrink' of this object of type '{__name__}.Point' is no method of its class"
    refused(SerializationError, text, rpc.remote("worker1", add_nothing, args=(point,)).rpc_sync().shrink)
    array, storage = rpc.remote("worker1", give_array), rpc.remote("worker1", give_storage)
    refused(SerializationError, "^the method 'tofile'", array.rpc_sync().tofile, path)
    refused(
        SerializationError, "^the method 'from_file'", storage.rpc_sync().from_file, "/etc/hostname", False, 1
    )
    refused(
        SerializationError, "^the method 'append'", rpc.remote("worker1", what_ran).rpc_sync().append, "more"
    )
    return [*os.listdir(worker.folder), *rpc.rpc_sync("worker1", what_ran)]


def test_references_give_no_more_than_the_list_names(run_workers: RunWorkers) -> None:
    found = first_of_safe(run_workers, reach_through_references)
    assert [name for name in found if not name.startswith(("worker", "rendezvous"))] == []


def serve_few_rounds(worker: Worker) -> None:
    """As ``serve_safely``; few rounds of ``all_gather`` may wait."""
    gather_rounds._MOST_ROUNDS = 5  # type: ignore[misc]
    with worker.group(**SAFE):
        rpc.barrier()


def begin_rounds(count: int) -> None:
    """That the other never comes to."""
    for number in range(count):
        names = ("worker0", f"x{number}")
        rpc.rpc_sync("worker1", gather_rounds._contribute, (names, 9, "worker0"), {"value": 0})


def call_what_is_always_allowed(_: Worker) -> None:
    """The functions of farcall itself."""
    names, contribute = ("worker0", "worker1"), gather_rounds._contribute
    for args in (
        (5, 1, "worker0"),
        ("worker0", 1, "w"),
        ((1, 2), 1, 2),
        (names, 1.5, "worker0"),
        (names, 1, "another"),
    ):
        refused(ProtocolError, "no such round", rpc.rpc_sync, "worker1", contribute, args, {"value": 0})
    told: tuple[Any, ...] = ("RpcError", "text", {})
    refused(ProtocolError, "no such round", rpc.rpc_sync, "worker1", gather_rounds._fail, (5, 9, *told))
    with pytest.raises(RpcError, match="more than 5 rounds of all_gather wait"):
        begin_rounds(6)
    rpc.barrier()


def test_what_is_always_allowed_stands_any_arguments(run_workers: RunWorkers) -> None:
    run_workers([in_group(call_what_is_always_allowed, **SAFE), serve_few_rounds])


HOSTILE_PICKLES = [
    b"cos\nsystem\n(S'touch ran'\ntR.",
    pickle.dumps((None, run, ("by hand",), {}, ()), 5),
    pickle.dumps((__name__, "run", ("by name",), {}, ()), 5),
    pickle.dumps(("builtins", "eval", ("ran.append(1)",), {}, ()), 5),
    pickle.dumps((__name__, "add", (Hostility(),), {}, ()), 5),
    pickle.dumps((None, add, (Hostility(),), {}, ()), 4),
    pickle.dumps((__name__, "ran.append", ("by attribute",), {}, ()), 5),
    pickle.dumps(("rpc.serialization.settings", "allow_function.__globals__", (), {}, ()), 5),
    b"\x80\x05]\x94(" + b"]" * 100_000 + b"e.",
    b"\x80\x05\x8e" + (1 << 60).to_bytes(8, "little") + b".",
    b"",
    b"\x80",
]
"""As they come over the wire, from a member that keeps to no rules."""


def neutral(*record: Any) -> bytes:
    """A call in the codec that is read."""
    return bytes(neutral_codec.dump(record, None, Reducers()).buffers[0])


HOSTILE_VALUES = [
    neutral(None, run, ("by hand",), {}),
    neutral(__name__, "run", ("by name",), {}),
    neutral("builtins", "eval", ("ran.append(1)",), {}),
    neutral(__name__, "add", (Hostility(),), {}),
    neutral(None, add, (Hostility(),), {}),
    neutral(__name__, "ran.append", ("by attribute",), {}),
    neutral("rpc.serialization.settings", "allow_function.__globals__", (), {}),
    b"\x91" * 100_000 + b"\xc0",
    b"\xdd\xff\xff\xff\xff",
    b"",
]


def attack(worker: Worker) -> list[str]:
    with worker.group(dynamic=True, **SAFE):
        wire, group = rpc.rpc_sync("worker0", say_target)
        at = Target(Member.from_wire(wire), group, current_agent().group.connections.authenticator)
        with Hostile(at) as peer:
            peer.join(peer.newcomer(1))
            hostile = [
                *((PICKLE, data) for data in HOSTILE_PICKLES),
                *((NEUTRAL, data) for data in HOSTILE_VALUES),
            ]
            for number, (codec, data) in enumerate(hostile, 1):
                peer.say(frame(Kind.CALL, {}, [data], number, codec))
                answer = peer.hear()
                assert answer is not None
                assert (answer.kind, answer.call_id) == (Kind.FAILURE, number)
                assert answer.header["!"][0] == "rpc.errors.SerializationError", answer.header["!"]
        assert rpc.rpc_sync("worker0", add, args=(1,)) == 2
        return list(rpc.rpc_sync("worker0", what_ran))


@backend.over_sockets
def test_hostile_messages_do_not_run(run_workers: RunWorkers) -> None:
    workers = run_workers.start(join_late, 1)
    workers[0].wait_for("ready")
    assert workers.add(attack).result() == []
    workers[0].tell("leave")
    workers.results()
    assert not workers[0].log.with_name("ran").exists()


# ---- one who is not safe


def call_one_who_is_safe(worker: Worker) -> list[Any]:
    with worker.group():
        refused(SerializationError, f"'{__name__}.run' is not on", rpc.rpc_sync, "worker1", run, ("x",))
        secret = rpc.remote("worker1", make_secret, args=(7,)).to_here()  # this side may read it
        return [secret.value, rpc.rpc_sync("worker1", what_ran)]


def test_each_worker_has_its_own_caution(run_workers: RunWorkers) -> None:
    assert run_workers([call_one_who_is_safe, serve_safely])[0] == [7, []]


@pytest.mark.parametrize("value", ["json", "", None, True])
def test_another_way_to_deserialize_is_refused(value: Any) -> None:
    refused(ValueError, 'deserialization must be "pickle" or "safe"', rpc.AgentOptions, deserialization=value)
