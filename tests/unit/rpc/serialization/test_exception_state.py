from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import RemoteError
from rpc.serialization.exception_state import twin
from tests.unit.rpc.serialization import zoo
from tests.unit.rpc.serialization.callees import FailsToLoad
from tests.unit.rpc.serialization.journey import raise_remotely, send

SLOTS = (
    *("args", "code", "path", "number", "place", "private", "detail", "fixed", "reason", "sector", "message"),
    *("errno", "strerror", "filename", "filename2", "characters_written", "value", "name", "msg", "lineno"),
    *("offset", "text", "end_lineno", "end_offset", "encoding", "object", "start", "end"),
    *("worker", "remote_type", "remote_traceback"),
)

Way = Callable[[Exception], BaseException]


def as_value(error: Exception) -> BaseException:
    return cast("BaseException", send(error))


def says(error: BaseException) -> dict[str, Any]:
    """What can be read of an exception, except what identifies it."""
    read = {name: getattr(error, name, "(none)") for name in SLOTS}
    attributes = {name: value for name, value in vars(error).items() if name not in ("__notes__", "was_set")}
    if isinstance(error, BaseExceptionGroup):
        read["args"] = ()
        read["exceptions"] = [(type(each), says(each)) for each in error.exceptions]
    if isinstance(error, zoo.Cyclic):
        attributes["me"] = type(attributes["me"])  # a shallow copy refers to the original
    return read | {"str": str(error), "attributes": attributes}


@pytest.mark.parametrize("way", [raise_remotely, as_value, twin])
@pytest.mark.parametrize("error", zoo.zoo(), ids=lambda error: type(error).__name__)
def test_an_exception_arrives_as_it_was_and_its_constructor_is_not_called(error: Exception, way: Way) -> None:
    made = zoo.Counted.made
    arrived = way(error)
    assert arrived is not error
    assert type(arrived) is type(error)
    assert says(arrived) == says(error)
    assert zoo.Counted.made == made


VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.lists(st.integers())
ATTRIBUTES = st.dictionaries(st.from_regex(r"[a-z]{3,8}_[a-z]", fullmatch=True), VALUES, max_size=3)
CLASSES = st.sampled_from(
    [Exception, ValueError, OSError, ImportError, SyntaxError, StopIteration, UnicodeDecodeError, KeyError]
)


@given(
    bases=st.lists(CLASSES, min_size=1, max_size=2, unique=True),
    arguments=st.lists(VALUES),
    attributes=ATTRIBUTES,
)
def test_any_class_with_any_arguments_and_attributes_arrives_as_it_was(
    bases: list[type[Exception]], arguments: list[Any], attributes: dict[str, Any]
) -> None:
    def construct(self: Any, secret: object) -> None:
        raise AssertionError("constructed again")

    try:
        kind = type("Drawn", tuple(bases), {"__module__": zoo.__name__, "__init__": construct})
    except TypeError:  # two bases that lie differently in memory
        return
    zoo.Drawn = kind  # type: ignore[attr-defined]
    base: Any = kind
    while "__new__" not in vars(base):
        base = base.__base__
    error = base.__new__(kind)
    error.args = tuple(arguments)
    error.__dict__.update(copy.deepcopy(attributes))
    error.add_note("a note")
    arrived = raise_remotely(error)
    assert type(arrived) is kind
    assert says(arrived) == says(error)
    assert arrived.__notes__[0] == "a note"


def test_members_of_a_group_are_its_arguments() -> None:
    member = zoo.TakesMore(1, "a")
    arrived = cast("ExceptionGroup[Exception]", raise_remotely(ExceptionGroup("several", [member])))
    assert arrived.exceptions[0] is arrived.args[1][0]
    matched, rest = arrived.split(zoo.TakesMore)
    assert matched is not None
    assert rest is None


def test_exceptions_that_end_threads_travel_as_values_and_in_groups() -> None:
    exit_, group = send((SystemExit(3), BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit(4)])))
    assert (type(exit_), exit_.code, exit_.args) == (SystemExit, 3, (3,))
    assert type(group) is BaseExceptionGroup
    assert [type(each) for each in group.exceptions] == [KeyboardInterrupt, SystemExit]
    assert getattr(group.exceptions[1], "code", None) == 4


def chained(error: BaseException, *links: tuple[str, BaseException]) -> BaseException:
    top = error
    for name, link in links:
        setattr(error, name, link)
        error = link
    return top


def test_causes_and_contexts_travel_as_a_traceback_prints_them() -> None:
    hidden = chained(ValueError("c"), ("__context__", KeyError("hidden")))
    hidden.__suppress_context__ = True
    error = chained(zoo.TakesMore(1, "a"), ("__cause__", zoo.Reduces(2, "b")), ("__context__", hidden))
    arrived = raise_remotely(error)
    cause = arrived.__cause__
    assert (type(cause), str(cause)) == (zoo.Reduces, "2: b")
    assert cause is not None
    assert cause.__cause__ is None
    assert (type(cause.__context__), str(cause.__context__)) == (ValueError, "c")
    assert cause.__context__ is not None
    assert cause.__context__.__context__ is None


def test_a_class_that_reduces_itself_gets_its_notes_and_its_cause_back() -> None:
    error = chained(zoo.Reduces(2, "b"), ("__cause__", ValueError("why")))
    error.add_note("a note")
    arrived = raise_remotely(error)
    assert arrived.__notes__[0] == "a note"
    assert type(arrived.__cause__) is ValueError


def test_a_cause_that_cannot_be_rebuilt_is_described_and_the_exception_arrives() -> None:
    class Broken(Exception):
        def __reduce__(self) -> Any:
            return FailsToLoad().__reduce__()

    bulky = ValueError("bulky")
    bulky.content = bytes(1 << 20)  # type: ignore[attr-defined]
    for cause, kind in ((Broken("b"), "Broken"), (bulky, "ValueError")):
        arrived = raise_remotely(chained(zoo.TakesMore(1, "a"), ("__cause__", cause)))
        assert type(arrived) is zoo.TakesMore
        assert type(arrived.__cause__) is RemoteError
        assert arrived.__cause__.remote_type.endswith(kind)
        assert str(cause) in str(arrived.__cause__)


def test_endless_chains_and_deep_ones_do_not_keep_an_exception_from_arriving() -> None:
    deep: BaseException = ValueError("0")
    for number in range(1, 5000):
        deep = chained(ValueError(str(number)), ("__context__", deep))
    assert str(raise_remotely(deep)) == "4999"
    first = ValueError("first")
    arrived = raise_remotely(chained(first, ("__cause__", KeyError("second")), ("__cause__", first)))
    assert str(arrived) == "first"
    assert type(arrived.__cause__) is KeyError


def test_what_cannot_be_pickled_is_named_and_the_rest_arrives() -> None:
    error = chained(zoo.Locks(3), ("__cause__", zoo.Locks(4)))
    arrived = raise_remotely(error)
    assert type(arrived) is zoo.Locks
    assert str(arrived) == str(error)
    assert arrived.code == 3
    assert not hasattr(arrived, "lock")
    assert "argument 1 is missing: cannot send argument 1, of type _thread.lock" in arrived.__notes__[0]
    assert "attribute 'lock' is missing: cannot send attribute 'lock'" in arrived.__notes__[1]
    assert type(arrived.__cause__) is zoo.Locks


def test_a_text_that_depends_on_what_cannot_be_pickled_is_the_same() -> None:
    error = zoo.TextOfLock()
    arrived = raise_remotely(error)
    assert type(arrived) is zoo.TextOfLock
    assert str(arrived) == str(error)


def test_what_cannot_be_pickled_in_a_group_costs_only_itself() -> None:
    error = ExceptionGroup("several", [zoo.Locks(3), ExceptionGroup("inner", [zoo.TakesMore(1, "a")])])
    arrived = raise_remotely(error)
    assert isinstance(arrived, ExceptionGroup)
    locks, inner = arrived.exceptions
    assert type(locks) is zoo.Locks
    assert "attribute 'lock' is missing" in locks.__notes__[1]
    assert isinstance(inner, ExceptionGroup)
    assert type(inner.exceptions[0]) is zoo.TakesMore


def test_an_attribute_that_cannot_be_read_here_costs_all_but_class_and_text() -> None:
    error = zoo.TakesMore(1, "a")
    error.add_note("a note")
    error.attribute = FailsToLoad()  # type: ignore[attr-defined]
    arrived = raise_remotely(error)
    assert type(arrived) is zoo.TakesMore
    assert str(arrived) == "1: a"
    assert "its arguments and attributes are missing: ValueError: cannot be rebuilt" in arrived.__notes__[0]


@pytest.mark.parametrize("way", [raise_remotely, as_value, twin])
def test_a_class_that_refuses_access_to_its_attributes_arrives(way: Way) -> None:
    error = zoo.Guarded("text")
    arrived = way(error)
    assert arrived is not error
    assert (type(arrived), str(arrived)) == (zoo.Guarded, "text")


def test_a_cause_that_is_also_an_argument_is_pickled_a_few_times_however_long_the_chain() -> None:
    first = error = zoo.CountsPickles("innermost")
    for _ in range(20):
        error = zoo.CountsPickles(error)
        error.__cause__ = error.args[0]
    arrived = raise_remotely(error)
    assert type(arrived.__cause__) is zoo.CountsPickles
    assert type(arrived.args[0].__cause__) is zoo.CountsPickles
    assert first.pickles <= 21
