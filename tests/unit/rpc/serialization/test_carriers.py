from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.errors import RRefError, SerializationError
from rpc.serialization.codecs import PICKLE
from rpc.serialization.payload import Arrivals
from rpc.serialization.portable import PortablePickler
from rpc.serialization.serializer import Serializer
from tests.unit.rpc.serialization.callees import FailsToLoad, null
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, Worker, deliver, send


class Ticket:
    """Travels beside the pickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise RuntimeError("must not be pickled")


class Season(Ticket):
    """So does what derives from it."""


class TicketOffice:
    """Keeps account of what travels."""

    kind = "ticket"

    def __init__(self) -> None:
        self.departed: list[tuple[int, Any]] = []
        self.returned: list[int] = []
        self.arrived: list[int] = []
        self.withdrawn = False
        self.waiting: list[Callable[[], object]] = []
        self.serializer = Serializer()
        self.serializer.register_carrier(Ticket, self)

    def depart(self, obj: Ticket, to: Worker | None) -> Any:
        if self.withdrawn:
            raise RRefError("this ticket is not valid any more")
        self.departed.append((obj.number, to))
        return [obj.number, "x"]

    def take_back(self, descriptors: list[Any], to: Worker) -> None:
        self.returned += [number for number, _ in descriptors]

    def arrive(self, descriptors: list[Any], source: Worker) -> list[Ticket]:
        self.arrived += [number for number, _ in descriptors]
        return [Ticket(number) for number, _ in descriptors]

    def ready(self, objects: list[Ticket], when_ready: Callable[[], object]) -> bool:
        if any(ticket.number < 0 for ticket in objects):
            self.waiting.append(when_ready)
            return False
        return True


@pytest.fixture
def office() -> TicketOffice:
    return TicketOffice()


def test_object_arrives_at_its_places(office: TicketOffice) -> None:
    ticket = Ticket(5)
    first, second, other = send([ticket, ticket, Ticket(6)], by=office.serializer)
    assert first is second
    assert (first.number, other.number) == (5, 6)
    assert office.arrived == [5, 6]


def test_failed_pickling_takes_back_what_departed(office: TicketOffice) -> None:
    with pytest.raises(SerializationError, match="argument 1"):
        office.serializer.between(peer_is_safe=False).dump_call(
            null, (Ticket(1), threading.Lock()), {}, CALLEE
        )
    assert office.returned == [1]
    assert len(office.departed) == 1  # looking for the culprit makes nothing depart


def test_unsent_message_is_taken_back_by_its_header(office: TicketOffice) -> None:
    payload = office.serializer.between(peer_is_safe=False).dumps([Ticket(1), Ticket(2)], CALLEE)
    office.serializer.take_back({"trace": [1]} | payload.header, CALLEE)
    assert office.returned == [1, 2]


def test_description_of_an_error_that_is_not_sent_brings_nothing(office: TicketOffice) -> None:
    payload = office.serializer.dump_exception(ValueError(Ticket(1)), CALLER.name, CALLEE)
    assert "ticket" in payload.header
    described = office.serializer.without_exception(payload.header, ValueError("over the limit"))
    assert list(described.header) == ["!"]
    assert not described.buffers


def test_error_of_a_carrier_keeps_its_class_and_names_the_call(office: TicketOffice) -> None:
    office.withdrawn = True
    with pytest.raises(RRefError, match="not valid any more") as caught:
        office.serializer.between(peer_is_safe=False).dump_call(null, (Ticket(1),), {}, CALLEE)
    assert "callees.null on worker 'callee'" in caught.value.__notes__[0]


def test_failed_unpickling_has_adopted_already(office: TicketOffice) -> None:
    header, buffers = deliver(
        office.serializer.between(peer_is_safe=False).dumps([FailsToLoad(), Ticket(1)], CALLEE)
    )
    arrivals = office.serializer.adopt(header, CALLER)
    with pytest.raises(SerializationError):
        office.serializer.between(peer_is_safe=False).loads(header, buffers, arrivals, CALLER)
    assert office.arrived == [1]


@pytest.mark.parametrize("descriptors", [1, "x", [1], [[1, 2, 3]]])
def test_malformed_descriptors_are_an_error(office: TicketOffice, descriptors: Any) -> None:
    with pytest.raises(SerializationError, match=r"worker 'caller'.*'ticket'"):
        office.serializer.adopt({"ticket": descriptors}, CALLER)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_want_of_resources_while_descriptors_are_read_is_no_fault_of_the_message(
    office: TicketOffice, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def arrive(*_: object) -> None:
        raise error

    monkeypatch.setattr(office, "arrive", arrive)
    with pytest.raises(type(error)):
        office.serializer.adopt({"ticket": [[1, "x"]]}, CALLER)


def test_pickle_that_refers_to_what_did_not_arrive_is_an_error(office: TicketOffice) -> None:
    header, buffers = deliver(office.serializer.between(peer_is_safe=False).dumps([Ticket(1)], CALLEE))
    with pytest.raises(SerializationError, match="which it does not bring"):
        office.serializer.between(peer_is_safe=False).loads(header, buffers, None, CALLER)
    with pytest.raises(SerializationError, match="which it does not bring"):
        office.serializer.between(peer_is_safe=False).loads(header, buffers, {"ticket": []}, CALLER)


def test_ready_waits_for_each_carrier_in_turn(office: TicketOffice) -> None:
    class Other(TicketOffice):
        kind = "other"

    other = Other()
    office.serializer.register_carrier(Season, other)
    calls = itertools.count()
    arrivals: Arrivals = {"ticket": [Ticket(-1)], "other": [Season(-2)]}
    assert not office.serializer.ready(arrivals, lambda: next(calls))
    office.waiting.pop()()
    other.waiting.pop()()
    assert next(calls) == 1


def test_kind_can_be_taken_only_once(office: TicketOffice) -> None:
    with pytest.raises(ValueError, match="'ticket' is taken"):
        office.serializer.register_carrier(Season, TicketOffice())
    office.serializer.register_carrier(Season, office)


@pytest.mark.parametrize("number", [PICKLE, -1, 256])
def test_the_number_of_a_codec_is_free_and_fits_a_byte(office: TicketOffice, number: int) -> None:
    codec: Any = SimpleNamespace(id=number)
    with pytest.raises(ValueError, match="taken, or not in 0 to 255"):
        office.serializer.register_codec(codec)


def test_object_outside_of_messages_is_refused(office: TicketOffice) -> None:
    with pytest.raises(SerializationError, match="in messages between workers only"):
        office.serializer.between(peer_is_safe=False).dumps(Ticket(1), None)


def test_object_pickled_by_a_nested_pickler_travels_with_the_message(office: TicketOffice) -> None:
    nested = Nested(Ticket(1))
    arrived = send([Ticket(0), nested], by=office.serializer)
    assert arrived[1].ticket.number == 1
    assert office.arrived == [0, 1]


class Nested:
    """Pickles its content itself, as programs for torch.distributed.rpc do."""

    def __init__(self, ticket: Any) -> None:
        self.ticket = ticket

    def __getstate__(self) -> Any:
        return PortablePickler().serialize([self.ticket])

    def __setstate__(self, state: Any) -> None:
        (self.ticket,) = PortablePickler().deserialize(*state)


def test_registered_reducer_applies_to_derived_classes(office: TicketOffice) -> None:
    office.serializer.register_reducer(Custom, lambda obj: (Custom.rebuilt, (obj.value,)))
    assert send(Custom(2), by=office.serializer).value == "rebuilt 2"
    assert send([DerivedCustom(3)], by=office.serializer)[0].value == "rebuilt 3"


class Custom:
    """Has a reducer of its own in messages."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def rebuilt(cls, value: Any) -> Custom:
        """Rebuild it, visibly."""
        return cls(f"rebuilt {value}")


class DerivedCustom(Custom):
    """Derived from it."""
