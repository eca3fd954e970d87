"""What no pickle is needed for, and what a hostile peer may write: read as something harmless, or refused."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import Any, Self

import msgpack
import pytest
import torch

from rpc.errors import SerializationError
from rpc.serialization.safe import AllowList
from rpc.serialization.serializer import Serializer
from tests.unit.rpc.serialization import callees
from tests.unit.rpc.serialization.callees import Pair, Plain, Slotted
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, SERIALIZER, safely, send

ran: list[Any] = []
NEUTRAL = SERIALIZER.between(peer_is_safe=True)
TUPLE, TENSOR, BUFFER, INTEGER, NAME, OBJECT, AGAIN = range(7)


def side_effect(*args: Any) -> str:
    """What no message may run."""
    ran.append(args)
    return "ran"


@pytest.fixture
def allow() -> AllowList:
    ran.clear()
    return AllowList()


def ext(number: int, content: Any) -> msgpack.ExtType:
    return msgpack.ExtType(number, content if isinstance(content, bytes) else msgpack.packb(content))


def named(module: str, name: str) -> msgpack.ExtType:
    return ext(NAME, [module, name])


def made(
    by: Any, *args: Any, state: Any = None, items: Any = None, pairs: Any = None, set_by: Any = None
) -> Any:
    return ext(OBJECT, [by, list(args), state, items, pairs, set_by])


def tensor(dtype: Any, shape: Any, stride: Any, data: Any) -> msgpack.ExtType:
    return ext(TENSOR, [dtype, shape, stride, data, False])


def packed(value: Any) -> bytes:
    """A value as the message that brings it."""
    data: bytes = msgpack.packb(ext(TUPLE, [value]))
    return data


def read(data: bytes, allow: AllowList, *buffers: Any) -> Any:
    return safely(allow).between(peer_is_safe=False).loads({}, [data, *buffers], None, CALLER)


def refused(value: Any, allow: AllowList, match: str, *buffers: Any) -> None:
    with pytest.raises(SerializationError, match=match):
        read(packed(value), allow, *buffers)
    assert ran == []


# ---- what another language would write


def test_plain_values_are_plain_msgpack() -> None:
    value = [None, True, -7, 2.5, "text", b"bytes", [1, [2]], {"key": {"k": 1}}]
    inner = msgpack.unpackb(NEUTRAL.dumps(value, CALLEE).buffers[0])
    assert (inner.code, msgpack.unpackb(inner.data)) == (TUPLE, [value])


def test_a_tensor_is_its_type_shape_strides_and_bytes(allow: AllowList) -> None:
    arrived = read(
        packed(tensor("int16", [2, 3], [1, 2], bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0]))), allow
    )
    assert torch.equal(arrived, torch.tensor([[1, 3, 5], [2, 4, 6]], dtype=torch.int16))


def test_a_large_tensor_lies_in_a_buffer(allow: AllowList) -> None:
    large = torch.rand(100, 100)
    payload = NEUTRAL.dumps({"a": large, "b": large.bfloat16()}, CALLEE)
    assert [len(buffer) for buffer in payload.buffers[1:]] == [40_000, 20_000]
    arrived = send({"a": large, "b": large.bfloat16()}, at=safely(allow))
    assert torch.equal(arrived["a"], large)
    assert torch.equal(arrived["b"], large.bfloat16())


# ---- what is kept of objects


def test_a_tensor_that_occurs_twice_arrives_as_one(allow: AllowList) -> None:
    allow.cls(Plain)
    one, other = torch.ones(3), Plain(1)
    first, inner, second = send([one, [Plain(one), other], {"x": other, "y": one}], at=safely(allow))
    assert inner[0].value is first
    assert second["y"] is first
    assert second["x"] is inner[1]


@pytest.mark.parametrize("by_itself", [True, False])
def test_what_holds_itself_is_refused_by_who_sends_it(allow: AllowList, by_itself: bool) -> None:
    holds = Plain([])
    holds.value.append(holds)
    with pytest.raises(SerializationError, match=r"that holds itself|nested too deeply"):
        send(holds if by_itself else holds.value, at=safely(allow))


def test_who_reads_without_a_list_takes_all_that_can_be_imported() -> None:
    value = [Plain(1), Pair(1, 2), callees.null, len, Plain, torch.nn.Linear(2, 3)]
    payload = safely(AllowList()).between(peer_is_safe=False).dumps(value, CALLEE)
    plain, pair, *rest, linear = Serializer().codecs[payload.codec].loads({}, payload.buffers, None, CALLER)
    assert (plain.value, pair, rest) == (1, Pair(1, 2), [callees.null, len, Plain])
    assert torch.equal(linear.weight, value[-1].weight)  # type: ignore[attr-defined]


# ---- what a hostile peer may write


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "bytearray"),
        (__name__, "side_effect"),
        (callees.__name__, "null.__globals__"),
        ("rpc.serialization.functions", "resolve"),
        ("rpc.serialization.tensors", "np.load"),
        ("rpc.serialization.tensor_kinds", "set_attributes"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("x", ""),
    ],
)
def test_names_are_looked_up_and_never_followed(allow: AllowList, module: str, name: str) -> None:
    allow.function(callees.null)
    refused(named(module, name), allow, "not on this worker's allow-list")
    refused(made(named(module, name)), allow, "not on this worker's allow-list")
    refused(
        made(named("builtins", "set"), set_by=named(module, name)), allow, "not on this worker's allow-list"
    )


def test_an_admitted_function_is_not_run_by_a_value(allow: AllowList) -> None:
    allow.function(side_effect)
    function = named(__name__, "side_effect")
    refused(made(function), allow, "not for messages to call")
    refused(made(None, function), allow, "is not admitted")
    refused(made(named("builtins", "set"), state=1, set_by=function), allow, "not for messages to call")
    for callee in (1, None, "text"):
        refused(made(callee, 1), allow, "not for messages to call|is not admitted")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion entries
        b"\xdf\x7f\xff\xff\xff\xc0",
        b"\xdd\x00\x00\xff\xff" * 99 + b"\xc0",
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 200 + b"\xc0",
        b"\xc0\xc0",
        msgpack.packb(1),
        msgpack.packb(ext(TUPLE, [])),
        msgpack.packb(ext(TUPLE, [1, 2])),
        msgpack.packb(ext(TUPLE, b"")),
        msgpack.packb(ext(99, 1)),
    ],
    ids=repr,
)
def test_malformed_values_take_no_memory(allow: AllowList, data: bytes) -> None:
    with pytest.raises(SerializationError):
        read(data, allow)


@pytest.mark.parametrize(
    "value",
    [
        ext(OBJECT, []),
        ext(NAME, ["os"]),
        ext(NAME, [1, 2]),
        ext(AGAIN, 0),
        ext(AGAIN, -1),
        ext(AGAIN, "x"),
        ext(BUFFER, 1),
        ext(BUFFER, 0),
        ext(TENSOR, []),
        ext(TUPLE, {"a": 1}),
        made(named("builtins", "set"), items=[1]),
        made(named("builtins", "set"), pairs=[[1, 2]]),
        made(named("collections", "deque"), items={"a": 1}),
        made(named("collections", "OrderedDict"), pairs=[[1, 2, 3]]),
        made(named("collections", "OrderedDict"), pairs=[[[], 2]]),
        made(named("rpc.serialization.carriers", "arrived"), "ref", 0),
        made(named("rpc.serialization.carriers", "arrived"), [], {}),
        made(None),
    ],
    ids=repr,
)
def test_malformed_extensions(allow: AllowList, value: Any) -> None:
    refused(value, allow, r"\w")


@pytest.mark.parametrize(
    "timestamp", [b"\xd6\xff" + bytes(4), b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12)]
)
def test_extensions_of_msgpacks_own(allow: AllowList, timestamp: bytes) -> None:
    with pytest.raises(SerializationError, match="the extension -1, which is msgpack's own"):
        read(msgpack.packb(ext(TUPLE, b"\x91" + timestamp)), allow)


def test_extensions_are_not_nested_without_end(allow: AllowList) -> None:
    value: Any = 1
    for _ in range(2000):
        value = ext(TUPLE, [value])
    refused(value, allow, "nested more than 100 deep")


def nested(value: Any, deep: int) -> Any:
    for _ in range(deep):
        value = [value]
    return value


@pytest.mark.parametrize("deep", [101, 500, 1000])
def test_what_is_nested_deeply_arrives(allow: AllowList, deep: int) -> None:
    arrived = send(nested(7, deep), at=safely(allow))
    for _ in range(deep):
        (arrived,) = arrived
    assert arrived == 7


def in_tuples(value: Any, lists: int, tuples: int) -> Any:
    """Lists nested within each of so many tuples within each other."""
    for _ in range(tuples):
        value = (nested(value, lists),)
    return value


@pytest.mark.parametrize("value", [nested(7, 1100), in_tuples(7, 500, 90)], ids=["lists", "tuples of lists"])
def test_what_is_nested_too_deeply_is_refused_by_who_sends_it(allow: AllowList, value: Any) -> None:
    with pytest.raises(SerializationError, match="nested too deeply: send something flat"):
        send(value, at=safely(allow))


@pytest.mark.parametrize("lists", range(45, 55))
def test_what_is_written_is_read(allow: AllowList, lists: int) -> None:
    """The innermost of the tuples must hold fewer lists than the others."""
    value = in_tuples(7, lists, 10)
    try:
        payload = NEUTRAL.dumps(value, CALLEE)
    except SerializationError:
        assert lists >= 50  # each tuple is a list, too
    else:
        assert read(bytes(payload.buffers[0]), allow) == value


def test_a_buffer_belongs_to_one_tensor(allow: AllowList) -> None:
    one = tensor("uint8", [8], [1], ext(BUFFER, 1))
    refused([one, one], allow, "used twice", bytearray(8))


@dataclass
class Settings:
    """An admitted class, and what must not happen to it."""

    safe: bool = True


class Level(enum.Enum):
    """An admitted enumeration: its members are shared by all."""

    LOW = 1


class Only:
    """An admitted class with one instance."""

    _instance: Any = None

    def __new__(cls) -> Self:
        cls._instance = cls._instance or super().__new__(cls)
        return cls._instance  # type: ignore[no-any-return]  # of that class


def test_only_what_the_value_makes_itself_gets_attributes(allow: AllowList) -> None:
    allow.cls(Settings)
    allow.cls(Level)
    refused(made(named(__name__, "Level"), 1, state={"safe": False}), allow, "attributes of")
    refused(made(named("builtins", "set"), state={"safe": False}), allow, "attributes of")
    assert read(packed(made(None, named(__name__, "Settings"), state={"safe": False})), allow) == Settings(
        False
    )
    assert Settings.safe
    assert not hasattr(Level.LOW, "safe")


@pytest.mark.parametrize("kind", ["Level", "Only"])
def test_what_was_there_before_is_not_changed(allow: AllowList, kind: str) -> None:
    allow.cls(Level)
    allow.cls(Only)
    arguments = [1] if kind == "Level" else []
    refused(made(None, named(__name__, kind), *arguments, state={"safe": False}), allow, "that others have")
    assert not hasattr(Level.LOW, "safe")
    assert Only().__dict__ == {}


@pytest.mark.parametrize(
    "kind", ["builtins.set", "builtins.frozenset", "collections.deque", "torch.Size"], ids=str
)
def test_a_container_is_not_filled_from_a_tensor_without_end(allow: AllowList, kind: str) -> None:
    endless = tensor("uint8", [1 << 62], [0], b"x")
    refused(made(named(*kind.split(".")), endless), allow, "elements of a Tensor")


def test_sparse_indices_have_memory_for_each(allow: AllowList) -> None:
    """Each is looked at."""
    kinds = "rpc.serialization.tensor_kinds"
    shape, many = ext(TUPLE, [5]), 1 << 60
    indices, values = tensor("int64", [1, many], [0, 0], b"x" * 8), tensor("uint8", [many], [0], b"x")
    refused(made(named(kinds, "sparse_coo"), indices, values, shape, False, False), allow, "memory for each")
    parts = [tensor("int64", [many, 3], [0, 1], bytes(24)), tensor("int64", [many, 0], [0, 1], b"")]
    parts += [tensor("uint8", [many, 0], [0, 1], b""), ext(TUPLE, [many, 2, 4])]
    layout = made(named(kinds, "constant"), "sparse_csr")
    refused(made(named(kinds, "sparse_compressed"), *parts, layout, False), allow, "memory for each")


@pytest.mark.parametrize("as_what", ["sparse_coo", "sparse_compressed"])
def test_sparse_tensors_do_not_share_indices(allow: AllowList, as_what: str) -> None:
    """Each would look through them, so that a message of a megabyte could take for ever."""
    kind, rows = named("rpc.serialization.tensor_kinds", as_what), 1000

    def sparse(indices: Any) -> Any:
        values = tensor("uint8", [rows], [0], b"x")
        if as_what == "sparse_coo":
            return made(kind, indices, values, ext(TUPLE, [5]), False, False)
        layout = made(named("rpc.serialization.tensor_kinds", "constant"), "sparse_csr")
        starts = tensor("int64", [rows + 1], [1], b"".join(n.to_bytes(8, "little") for n in range(rows + 1)))
        return made(kind, starts, indices, values, ext(TUPLE, [rows, 5]), layout, False)

    shape = [1, rows] if as_what == "sparse_coo" else [rows]
    indices = tensor("int64", shape, [1] * len(shape), bytes(8 * rows))
    assert len(read(packed([sparse(indices), sparse(indices)]), allow)) == 2
    refused([indices, *[sparse(ext(AGAIN, 0))] * 100], allow, "memory for each, and their own")


def test_the_state_of_a_module(allow: AllowList) -> None:
    state = torch.nn.Linear(2, 1).state_dict()
    arrived = send(state, at=safely(allow))
    assert type(arrived) is type(state)
    assert vars(arrived) == vars(state)
    assert all(torch.equal(arrived[name], state[name]) for name in state)
    other = made(named("collections", "OrderedDict"), state={"_metadata": {}, "keys": 1})
    refused(other, allow, "attributes of an OrderedDict")


def test_sets_within_sets_are_not_shared(allow: AllowList) -> None:
    """Equal ones of which each holds the one before twice take for ever to be compared."""
    inner = made(named("builtins", "frozenset"), [1])
    refused([inner, made(named("builtins", "frozenset"), [ext(AGAIN, 0)])], allow, "comes once")
    shared = frozenset([1])
    arrived = send([shared, frozenset([shared]), x := torch.ones(2), x], at=safely(allow))
    assert arrived[:2] == [shared, frozenset([shared])]
    assert arrived[2] is arrived[3]


def test_slots_that_a_class_does_not_have(allow: AllowList) -> None:
    allow.cls(Slotted)
    state = ext(TUPLE, [None, {"__class__": None}])
    refused(made(None, named(callees.__name__, "Slotted"), state=state), allow, "attribute '__class__'")


def test_exceptions_are_not_made_by_values(allow: AllowList) -> None:
    """Some crash the process when they are printed, once their attributes were set."""
    name = named("builtins", "UnicodeDecodeError")
    refused(made(name), allow, "'builtins.UnicodeDecodeError' is not on")


def test_constants_are_looked_up_where_nothing_is_imported(allow: AllowList) -> None:
    before = set(sys.modules)
    for name in ("_inductor", "onnx", "nn", "add"):
        constant = made(named("rpc.serialization.tensor_kinds", "constant"), name)
        refused(constant, allow, f"'torch.{name}' is no constant")
    assert set(sys.modules) == before


def test_a_tuple_cannot_be_made_large_by_naming_it_again(allow: AllowList) -> None:
    allow.cls(Pair)
    pair = made(None, named(callees.__name__, "Pair"), 1, 2)
    refused([pair, ext(AGAIN, 0)], allow, "comes once")
    refused([ext(TUPLE, [1]), ext(AGAIN, 0)], allow, "has not come before")


@pytest.mark.parametrize(
    ("dtype", "shape", "stride", "data"),
    [
        ("float32", [100], [1], b"x" * 8),
        ("float32", [2], [1 << 40], b"x" * 8),
        ("float32", [2], [-1], b"x" * 8),
        ("float32", [10**9], [1], b""),
        ("float32", [1 << 62, 1 << 62], [1, 1], b"x" * 8),
        ("float32", [2], [1, 1], b"x" * 8),
        ("float32", 2, [1], b"x" * 8),
        ("float32", [2.0], [1], b"x" * 8),
        ("float32", [2], [1], "text of 9"),
        ("float32", [2], [1], [1, 2]),
        ("qint8", [2], [1], b"x" * 8),
        ("__builtins__", [2], [1], b"x" * 8),
        (1, [2], [1], b"x" * 8),
    ],
    ids=repr,
)
def test_tensors_that_reach_beyond_their_memory(
    allow: AllowList, dtype: Any, shape: Any, stride: Any, data: Any
) -> None:
    refused(tensor(dtype, shape, stride, data), allow, "a tensor|malformed|'torch|torch's")


def test_sparse_indices_out_of_range(allow: AllowList) -> None:
    bad = made(
        named("rpc.serialization.tensor_kinds", "sparse_coo"),
        tensor("int64", [1, 2], [2, 1], (0).to_bytes(8, "little") + (9).to_bytes(8, "little")),
        tensor("float32", [2], [1], bytes(8)),
        [2],
        False,
        False,
    )
    refused(bad, allow, "malformed")


@pytest.mark.parametrize(
    "record",
    [
        ext(TUPLE, []),
        ext(TUPLE, [callees.__name__, "null", 3, {}]),
        ext(TUPLE, [callees.__name__, "null", [], {}]),
        ext(TUPLE, [callees.__name__, "null", ext(TUPLE, []), []]),
        ext(TUPLE, [1, 2, ext(TUPLE, []), {}]),
        ext(TUPLE, [None, 1, ext(TUPLE, []), {}]),
        ext(TUPLE, [None, [], ext(TUPLE, []), {}]),
        [1, 2, 3, 4],
    ],
    ids=repr,
)
def test_malformed_calls(allow: AllowList, record: Any) -> None:
    allow.function(callees.null)
    with pytest.raises(SerializationError):
        safely(allow).between(peer_is_safe=False).load_call({}, [msgpack.packb(record)], None, CALLER)
