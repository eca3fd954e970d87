"""Members of enumerations arrive as the members they were, also in safe mode."""

from __future__ import annotations

import enum

import pytest

from rpc.serialization.safe import AllowList
from tests.unit.rpc.serialization.journey import safely, send


class Level(enum.IntEnum):
    """A number as well."""

    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    """Members that combine."""

    READ = enum.auto()
    WRITE = enum.auto()


class Planet(enum.Enum):
    """Values of several parts, and a constructor."""

    EARTH = (1, 2.5)
    MARS = (2, 0.5)

    def __init__(self, place: int, radius: float) -> None:
        self.place = place
        self.radius = radius


class Named(enum.Enum):
    """Says itself how it is pickled."""

    ONLY = 1

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return named, (self.name,)


def named(name: str) -> Named:
    """The member of that name."""
    return Named[name]


@pytest.mark.parametrize(
    "member", [Level.HIGH, Access.READ, Access.READ | Access.WRITE, Access(0), Planet.MARS, Named.ONLY]
)
def test_a_member_arrives_as_itself(member: enum.Enum) -> None:
    assert send(member) is member


@pytest.mark.parametrize("member", [Level.HIGH, Access.READ | Access.WRITE, Planet.MARS])
def test_safe_mode_needs_nothing_but_the_class(member: enum.Enum) -> None:
    allow = AllowList()
    allow.cls(type(member))
    assert send(member, at=safely(allow)) is member
