from __future__ import annotations

import enum
import pickle
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rpc.errors import SerializationError
from rpc.serialization.safe import AllowList
from tests.unit.rpc.serialization import callees
from tests.unit.rpc.serialization.callees import Pair, Plain, Slotted
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, SERIALIZER, safely

ran: list[Any] = []


def side_effect(*args: Any) -> str:
    """What no pickle may run."""
    ran.append(args)
    return "ran"


@pytest.fixture
def allow() -> AllowList:
    ran.clear()
    return AllowList()


def read(data: bytes, allow: AllowList, *buffers: Any) -> Any:
    """What a hand-made pickle builds."""
    return safely(allow).loads({}, [data, *buffers], None, CALLER)


def refused(data: bytes, allow: AllowList, match: str, *buffers: Any) -> None:
    with pytest.raises(SerializationError, match=match):
        read(data, allow, *buffers)
    assert ran == []


def named(module: str, name: str) -> bytes:
    """The instructions that push what a name means."""
    return pickle.dumps((module, name), 5)[2:-1][9:].split(b"\x86")[0].replace(b"\x94", b"") + b"\x93"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("builtins", "bytearray"),
        ("tests.unit.rpc.serialization.test_restricted_unpickler", "side_effect"),
        ("tests.unit.rpc.serialization.callees", "null.__globals__"),
        ("rpc.serialization.functions", "resolve"),
        ("rpc.serialization.tensors", "np.load"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("x", ""),
    ],
)
def test_names_are_looked_up_and_never_followed(allow: AllowList, module: str, name: str) -> None:
    allow.function(callees.null)
    refused(b"\x80\x05" + named(module, name) + b")\x86.", allow, "not on this worker's allow-list")
    refused(b"\x80\x05" + named(module, name) + b")R)\x86.", allow, "not on this worker's allow-list")


def test_admitted_function_is_not_run_by_a_pickle(allow: AllowList) -> None:
    allow.function(side_effect)
    refused(b"\x80\x05" + named(__name__, "side_effect") + b")R)\x86.", allow, "not for pickles to call")
    refused(b"\x80\x05" + named(__name__, "side_effect") + b")\x81)\x86.", allow, "which is not admitted")


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(X\x02\x00\x00\x00lstR.",  # GLOBAL
        b"(X\x02\x00\x00\x00lsios\nsystem\n.",  # INST
        b"\x82\x01.",  # EXT1
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"Pid\n.",  # PERSID
        b"NQ.",  # BINPERSID
        b"Nr\xff\xff\xff\xff.",  # LONG_BINPUT
        b"Np4294967295\n.",  # PUT
        b"I" + b"9" * 100 + b"\n.",
        b"(o.",
        b"N2.",
        b"\xff.",
    ],
    ids=repr,
)
def test_instructions_that_our_pickler_does_not_write(allow: AllowList, code: bytes) -> None:
    refused(b"\x80\x05" + code, allow, "instruction that is refused")


@pytest.mark.parametrize("version", [0, 2, 4, 6])
def test_other_protocols(allow: AllowList, version: int) -> None:
    refused(bytes([0x80, version]) + b"N)\x86.", allow, "protocol 5")


@pytest.mark.parametrize(
    "code",
    [
        b"\x96" + struct.pack("<Q", 1 << 62),  # BYTEARRAY8 of 4 exabytes
        b"\x8e" + struct.pack("<Q", 1 << 40),
        b"\x8d" + struct.pack("<Q", 1 << 40),
        b"B" + struct.pack("<I", 1 << 31),
        b"\x8b" + struct.pack("<I", 1 << 31),
        b"\x8c\xff",
    ],
    ids=repr,
)
def test_lengths_beyond_the_message_take_no_memory(allow: AllowList, code: bytes) -> None:
    refused(b"\x80\x05" + code + b"x.", allow, "in the middle of an instruction")


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b".",
        b"N",
        b"NN.",
        b"(.",
        b"e.",
        b"h\x00.",
        b")\x86.",
        b"a.",
        b"Na.",
        b"NNNs.",
        b"R.",
        b"b.",
        b"0.",
        b"1.",
    ],
    ids=repr,
)
def test_malformed_pickles(allow: AllowList, code: bytes) -> None:
    refused(b"\x80\x05" + code, allow, "pickle|record")


@dataclass
class Settings:
    """An admitted class, and what must not happen to it."""

    safe: bool = True


class Level(enum.Enum):
    """An admitted enumeration: its members are shared by all."""

    LOW = 1


def test_state_of_what_the_pickle_has_not_made_is_left_alone(allow: AllowList) -> None:
    allow.cls(Settings)
    allow.cls(Level)
    allow.function(side_effect)
    state = b"}\x8c\x04safe\x89sb)\x86."
    for target in (
        named(__name__, "Settings"),
        named(__name__, "side_effect"),
        named(__name__, "Level") + b"K\x01\x85R",
    ):
        refused(b"\x80\x05" + target + state, allow, "sets attributes of")
    assert Settings.safe
    assert not hasattr(Level.LOW, "safe")


def test_slots_that_a_class_does_not_have(allow: AllowList) -> None:
    allow.cls(Slotted)
    make = named(callees.__name__, "Slotted") + b")\x81"
    refused(b"\x80\x05" + make + b"N}\x8c\x09__class__Ns\x86b)\x86.", allow, "sets '__class__'")


def test_exceptions_are_not_made_by_pickles(allow: AllowList) -> None:
    """Some crash the process when they are printed, once their attributes were set."""
    make = named("builtins", "UnicodeDecodeError") + b")R"
    refused(b"\x80\x05" + make, allow, "'builtins.UnicodeDecodeError' is not on")


def test_constants_are_looked_up_where_nothing_is_imported(allow: AllowList) -> None:
    before = set(sys.modules)
    constant = named("rpc.serialization.tensor_kinds", "constant")
    for name in (b"_inductor", b"onnx", b"nn", b"add"):
        data = b"\x80\x05" + constant + b"\x8c" + bytes([len(name)]) + name + b"\x85R)\x86."
        refused(data, allow, f"'torch.{name.decode()}' is no constant")
    assert set(sys.modules) == before


def test_tuples_that_are_too_deep_to_hash(allow: AllowList) -> None:
    deep = b")" + b"\x85" * 1_000_000
    refused(b"\x80\x05}" + deep + b"Ns)\x86.", allow, "nests tuples")


def test_tuples_that_take_for_ever_to_hash(allow: AllowList) -> None:
    double = b")" + b"\x94h\x00\x86" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(1, 60))
    refused(b"\x80\x05}" + double + b"Ns)\x86.", allow, "nests tuples")
    deque = named("collections", "deque")
    refused(b"\x80\x05" + deque + double + b"N\x86R)\x86.", allow, "nests tuples")


def test_deep_named_tuples_of_an_admitted_class(allow: AllowList) -> None:
    allow.cls(Pair)
    wrap = b"".join(b"\x94h\x00h" + bytes([i]) + b"N\x86\x81" for i in range(1, 200))
    deep = named(callees.__name__, "Pair") + b"\x940)" + wrap
    refused(b"\x80\x05}" + deep + b"Ns)\x86.", allow, "nests tuples")


def test_large_flat_tuples_are_no_danger(allow: AllowList) -> None:
    value = (tuple(range(200_000)), (tuple(range(200_000)),))
    assert read(pickle.dumps((value, ()), 5), allow) == value


def test_readonly_buffer_of_a_number_takes_no_memory(allow: AllowList) -> None:
    refused(b"\x80\x05J\xff\xff\xff\x7f\x98)\x86.", allow, "where a buffer belongs")


def test_error_about_what_takes_for_ever_to_print_comes_at_once(allow: AllowList) -> None:
    allow.function(callees.null)
    double = b"]" + b"".join(b"\x94]h" + bytes([i]) + b"ah" + bytes([i]) + b"a" for i in range(60))
    refused(b"\x80\x05" + double + b")R)\x86.", allow, "calls a list")
    call = b"\x80\x05(" + double + b"\x941(Nh" + bytes([60]) + b")})t."
    with pytest.raises(SerializationError, match="'list' is not a function"):
        safely(allow).load_call({}, [call], None, CALLER)


def tensor_pickle(function: str, *arguments: Any) -> bytes:
    """A pickle that calls a rebuilding function."""
    return (
        b"\x80\x05"
        + named("rpc.serialization.tensors", function)
        + pickle.dumps(arguments, 5)[2:-1].replace(b"\x94", b"")
        + b"R)\x86."
    )


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("dense", ("O", (1,), b"x" * 8)),
        ("dense", ("f", (100,), b"x" * 8)),
        ("dense", ("f", (-1,), b"x" * 8)),
        ("dense", ("f", (1 << 62, 1 << 62), b"x" * 8)),
        ("dense", ("f", (2,), "text")),
        ("placed", ("float32", (100,), (1,), b"x" * 8, False)),
        ("placed", ("float32", (2,), (1 << 40,), b"x" * 8, False)),
        ("placed", ("float32", (2,), (-1,), b"x" * 8, False)),
        ("placed", ("float32", (10**9,), (1,), b"", False)),
        ("placed", ("float32", (1 << 62, 1 << 62), (1, 1), b"x" * 8, False)),
        ("placed", ("float32", [2], (1,), b"x" * 8, False)),
        ("placed", ("qint8", (2,), (1,), b"x" * 8, False)),
        ("placed", ("load", (2,), (1,), b"x" * 8, False)),
        ("placed", ("__builtins__", (2,), (1,), b"x" * 8, False)),
    ],
    ids=repr,
)
def test_tensors_that_reach_beyond_their_memory(allow: AllowList, function: str, arguments: Any) -> None:
    refused(tensor_pickle(function, *arguments), allow, "a tensor|pickle is malformed|'torch")


@pytest.mark.parametrize(
    "bare", [("O", (1,), b"x" * 8), ("f", (100,), b"x" * 8), ("f", (-1,), b""), (1, 2, 3)]
)
def test_bare_tensor_that_reaches_beyond_its_memory(allow: AllowList, bare: Any) -> None:
    refused(pickle.dumps((None, bare), 5), allow, "a tensor")


def test_sparse_indices_out_of_range(allow: AllowList) -> None:
    bad = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.rand(2), (10,))
    payload = SERIALIZER.dumps(bad, CALLEE)
    hostile = bytes(payload.buffers[0]).replace(b"K\x0a\x85", b"K\x02\x85")
    assert hostile != payload.buffers[0]
    refused(hostile, allow, "pickle is malformed")


@pytest.mark.parametrize(
    "record",
    [
        (),
        (1,),
        (callees.__name__, "null", 3, {}, ()),
        (callees.__name__, "null", (), [], ()),
        (callees.__name__, "null", (), {}),
        (callees.__name__, "null", [None], {}, [(5, ("f", (1,), b"1234"))]),
        (callees.__name__, "null", [None], {}, [(0, ("O", (1,), b"12345678"))]),
        (callees.__name__, "null", [None], {}, 7),
        (1, 2, (), {}, ()),
        (None, 1, (), {}, ()),
        (None, None, b"x", [], ()),
        [1, 2, 3],
    ],
    ids=repr,
)
def test_malformed_calls(allow: AllowList, record: Any) -> None:
    allow.function(callees.null)
    with pytest.raises(SerializationError):
        safely(allow).load_call({}, [pickle.dumps(record, 5)], None, CALLER)


def test_damaged_messages_are_refused_or_read_as_something_harmless(allow: AllowList) -> None:
    allow.function(callees.null)
    allow.cls(Plain)
    value = [Plain({"a": (1, 2)}), torch.ones(4, 4)[:, 1], torch.eye(3).to_sparse(), {1.5: "x"}, 2**70]
    payload = SERIALIZER.dump_call(callees.null, (value, torch.ones(5)), {"k": {"x"}}, CALLEE)
    original = bytes(payload.buffers[0])
    generator = random.Random(0)
    outcomes = set()
    for _ in range(2000):
        damaged = bytearray(original)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(len(damaged))
            action = generator.random()
            if action < 0.6:
                damaged[place] = generator.randrange(256)
            elif action < 0.8:
                del damaged[place]
            else:
                damaged[place:place] = original[place : place + generator.randint(1, 8)]
        try:
            safely(allow).load_call({}, [bytes(damaged)], None, CALLER)
            outcomes.add("read")
        except SerializationError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
