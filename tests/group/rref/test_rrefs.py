"""``remote`` and ``RRef``: objects that stay where they are made, and how others use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from farcall.observe.worker.looks import Looker
from rpc.errors import RpcTimeoutError, RRefError
from rpc.runtime.current import current_agent
from tests.support.serving import in_standing_group, in_worker0, open_gate, wait_at_gate, wait_for_arrivals


class Account:
    def __init__(self, balance: int = 0) -> None:
        self.balance = balance
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"balance": self.balance}  # a copy has no lock

    def deposit(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    def look(self) -> int:
        return self.balance

    def withdraw(self, amount: int) -> int:
        if amount > self.balance:
            raise LookupError(f"{amount} is more than {self.balance}")
        return self.deposit(-amount)

    def has_lock(self) -> bool:
        return hasattr(self, "lock")

    def hold(self) -> int:
        """Returns the balance once the gate is open."""
        return int(wait_at_gate(value=self.balance))


# ---- whose it is


@in_standing_group()
def test_a_reference_knows_its_owner() -> None:
    theirs = rpc.remote("worker1", Account, args=(3,))
    assert isinstance(theirs, rpc.RRef)
    assert not theirs.is_owner()
    assert theirs.owner() == rpc.get_worker_info("worker1")
    assert theirs.owner_name() == "worker1"
    assert theirs.to_here().balance == 3
    theirs._get_future().wait()
    assert theirs.confirmed_by_owner()
    with pytest.raises(RRefError, match=r"can't call localValue\(\) on user.*worker0.*owner.*worker1"):
        theirs.local_value()
    for mine in (
        rpc.RRef(Account(4)),
        rpc.remote("worker0", Account, args=(4,)),
        rpc.remote(0, Account, (4,)),
    ):
        assert mine.is_owner()
        assert mine.owner_name() == "worker0"
        assert mine.local_value() is mine.to_here()
        assert mine.local_value().balance == 4
        assert mine.confirmed_by_owner()


@in_standing_group()
def test_to_here_copies_and_proxies_use_the_object_itself() -> None:
    rref = rpc.remote("worker1", Account)
    rref.to_here().deposit(100)  # on a copy
    seen = [rref.rpc_sync().deposit(1), rref.rpc_sync().deposit(1), rref.to_here().balance]
    assert [*seen, rref.to_here().has_lock(), rref.rpc_sync().has_lock()] == [1, 2, 2, False, True]


# ---- proxies


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
@in_standing_group()
def test_proxies_call_methods(owner: str) -> None:
    rref = rpc.remote(owner, Account)
    values = [
        rref.rpc_sync().deposit(1),
        rref.rpc_async().deposit(amount=2).wait(),
        rref.remote().deposit(3).to_here(),
    ]
    overdrawing: list[Callable[[], Any]] = [
        lambda: rref.rpc_sync().withdraw(100),
        lambda: rref.rpc_async().withdraw(100).wait(),
        lambda: rref.remote().withdraw(100).to_here(),
    ]
    for withdraw in overdrawing:
        with pytest.raises(LookupError, match="100 is more than 6"):
            withdraw()
    missing: list[Callable[[], Any]] = [
        lambda: rref.rpc_sync().nothing(),
        lambda: rref.rpc_async().nothing().wait(),
        lambda: rref.remote().nothing().to_here(),
    ]
    for call in missing:
        with pytest.raises(AttributeError, match="nothing"):
            call()
    assert values == [1, 3, 6]


# ---- making fails


def refuse() -> None:
    raise LookupError("not today")


def ask_for_it(rref: rpc.RRef[Any]) -> str:
    with pytest.raises(LookupError, match="not today") as caught:
        rref.local_value() if rref.is_owner() else rref.to_here()
    return type(caught.value).__name__


@pytest.mark.parametrize("owner", ["worker0", "worker1"])
@in_standing_group()
def test_an_attribute_that_is_no_method_is_named(owner: str) -> None:
    account = rpc.remote(owner, Account, args=(5,))
    with pytest.raises(TypeError, match=r"'balance' of this Account is no method, but an int: .*to_here\(\)"):
        account.rpc_sync().balance()


@in_standing_group(world_size=3)
def test_whoever_asks_for_what_could_not_be_made_gets_the_error() -> None:
    rref = rpc.remote("worker1", refuse)
    seen = [rpc.rpc_sync(to, ask_for_it, args=(rref,)) for to in ("worker0", "worker1", "worker2")]
    with pytest.raises(LookupError, match="not today"):
        rref.rpc_sync().anything()
    assert [*seen, ask_for_it(rref), ask_for_it(rpc.remote("worker0", refuse))] == ["LookupError"] * 5


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return refuse_to_be_read, ()


def refuse_to_be_read() -> None:
    raise RuntimeError("unreadable")


@in_standing_group()
def test_what_is_sent_to_what_could_not_be_made_is_not_read() -> None:
    rref = rpc.remote("worker1", refuse)
    with pytest.raises(LookupError, match="not today"):
        rref.rpc_sync().anything(Unreadable())


@in_standing_group()
def test_a_creation_that_timed_out_stays_of_no_use() -> None:
    rref = rpc.remote("worker1", wait_at_gate, timeout=0.05)
    with pytest.raises(RpcTimeoutError):
        rref._get_future().wait()
    waits: list[Callable[[], Any]] = [
        rref.to_here,
        lambda: rref.rpc_sync().anything(),
        lambda: rpc.rpc_sync("worker1", ask_for_it, args=(rref,)),
    ]
    of_no_use = r"creation via rpc\.remote on worker 'worker1' failed.*timeout of 50 ms.*wait_at_gate"
    for wait in waits:
        with pytest.raises(RpcTimeoutError, match=of_no_use):
            wait()
    rpc.rpc_sync("worker1", open_gate)
    with pytest.raises(RpcTimeoutError, match=of_no_use):
        rref.to_here()  # it may be made by now, but late is too late


# ---- passed on


def owned_here(rref: rpc.RRef[Any]) -> tuple[str, bool, int]:
    value = rref.local_value() if rref.is_owner() else rref.to_here()
    return rref.owner_name(), rref.is_owner(), value.balance


def pass_on(rref: rpc.RRef[Any], route: list[str]) -> list[tuple[str, bool, int]]:
    if not route:
        return []
    rref.rpc_sync().deposit(1)
    seen = owned_here(rref)
    rest: list[tuple[str, bool, int]] = rpc.rpc_sync(route[0], pass_on, args=(rref, route[1:]))
    return [seen, *rest]


@in_worker0(world_size=4)
def test_a_reference_is_passed_from_worker_to_worker() -> None:
    route = ["worker2", "worker1", "worker3", "worker0", "worker2", "worker0"]
    seen = pass_on(rpc.remote("worker1", Account), route)
    here = ["worker0", *route[:-1]]
    assert seen == [("worker1", worker == "worker1", 1 + step) for step, worker in enumerate(here)]


def deposit_all(accounts: dict[str, Any], amount: int) -> int:
    found = [*accounts["list"], accounts["only"], *accounts["tuple"][1]]
    return sum(rref.rpc_sync().deposit(amount) for rref in found)


@in_standing_group(world_size=3)
def test_references_travel_in_containers() -> None:
    rrefs = [rpc.remote(f"worker{number % 3}", Account, args=(number,)) for number in range(6)]
    accounts = {"list": rrefs[:3], "only": rrefs[3], "tuple": (0, rrefs[4:])}
    assert int(rpc.rpc_sync("worker2", deposit_all, args=(accounts, 10))) == sum(range(6)) + 60


def open_account(owner: str, balance: int) -> rpc.RRef[Account]:
    return rpc.RRef(Account(balance)) if owner == "here" else rpc.remote(owner, Account, args=(balance,))


@in_standing_group(world_size=3)
def test_references_travel_in_results() -> None:
    owners = ["here", "worker0", "worker1", "worker2"]
    returned = [rpc.rpc_sync("worker1", open_account, args=(owner, 7)) for owner in owners]
    fetched = [rpc.remote("worker1", open_account, args=(owner, 8)).to_here() for owner in owners]
    seen = [("worker1", False), ("worker0", True), ("worker1", False), ("worker2", False)]
    assert [owned_here(rref) for rref in returned] == [(*owner, 7) for owner in seen]
    assert [owned_here(rref) for rref in fetched] == [(*owner, 8) for owner in seen]


@in_standing_group(world_size=3)
def test_a_reference_travels_in_a_closure() -> None:
    rref = rpc.remote("worker1", Account, args=(40,))
    assert int(rpc.rpc_sync("worker2", lambda amount: rref.rpc_sync().deposit(amount), args=(2,))) == 42


def open_and_deposit(rref: rpc.RRef[Account], amount: int) -> int:
    return int(rref.rpc_sync().deposit(amount))


@in_standing_group(world_size=3)
def test_a_reference_may_be_forgotten_as_soon_as_it_is_passed_on() -> None:
    calls = [
        rpc.rpc_async("worker2", open_and_deposit, args=(rpc.remote("worker1", Account, args=(number,)), 1))
        for number in range(100)
    ]
    assert [call.wait() for call in calls] == list(range(1, 101))


# ---- what observers are told


def observed() -> tuple[list[Any], list[Any]]:
    """What runs here, and the types and sizes of the objects."""
    snapshot = Looker().look([current_agent()], time.monotonic())
    owned = current_agent().extensions["rref"].observed()["owned"]
    return [each.get("what") for each in snapshot["requests"]], [
        (each["type"], each["bytes"]) for each in owned
    ]


@in_worker0()
def test_observers_are_told_the_classes_of_methods_and_the_sizes_of_tensors() -> None:
    account, tensor = rpc.remote("worker1", Account), rpc.remote("worker1", torch.ones, args=(3, 5))
    held = account.rpc_async().hold()
    rpc.rpc_sync("worker1", wait_for_arrivals, args=(1,))
    tensor.to_here()
    running, owned = rpc.rpc_sync("worker1", observed)
    assert "Account.hold" in running
    assert sorted(owned) == [("Account", 0), ("float32[3, 5]", 60)]
    rpc.rpc_sync("worker1", open_gate)
    held.wait()
