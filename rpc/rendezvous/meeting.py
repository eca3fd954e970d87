"""The end of the start: the workers of a static group leave ``init_rpc`` together.

The verdicts reach the workers one by one, and the coordinator last. A worker that returned with its verdict
could call another that does not serve yet, or whose program has not reached the definitions that follow. So
each writes when it is ready, the coordinator waits for all, and all continue when it says so. The workers
poll for that, so they return within a few milliseconds of each other in a small group.

A worker that dies in the meantime is not waited for: its loss is detected like that of any worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from rpc.errors import RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous.address import Probe, dead_among, probe
from rpc.rendezvous.arrivals import Group
from rpc.rendezvous.store import Backoff, SharedStore, StoreLost, StoreWait

__all__ = ["meet"]

_PROBE_SECONDS: Final = 1.0
"""Interval in seconds at which it is checked which workers have died."""


def meet(store: SharedStore, group: Group, timeout: float, *, tell: Probe = probe) -> None:
    """Return when all living workers of a static group have called this.

    Args:
        store: store in which they have met.
        group: outcome of the rendezvous.
        timeout: timeout in seconds for all others.
        tell: returns whether a member lives.

    Raises:
        RendezvousTimeoutError: a living worker has not called it in time.
    """
    shared = store.under(f"farcall/meeting/{group.key}")
    coordinator = min(group.members, key=lambda member: member.id)

    def work(waiting: StoreWait) -> None:
        try:
            if group.me.id == coordinator.id:
                _await(shared, {f"ready/{each.id}": each for each in group.others}, waiting, tell)
                shared.set("go", b"1")
            else:
                shared.set(f"ready/{group.me.id}", b"1")
                _await(shared, {"go": coordinator}, waiting, tell, len(group.members))
        except StoreLost:
            return  # lost with the process that served it, which had its group by then

    shared.run(work, timeout)


def _await(
    store: SharedStore, awaited: dict[str, Member], waiting: StoreWait, tell: Probe, waiters: int = 1
) -> None:
    """Wait for keys that members set, unless those members die."""
    backoff = Backoff(waiting, min(0.5, max(0.005, waiters / 2000)))
    probed_at = time.monotonic()
    while awaited and not store.has(*awaited):
        if time.monotonic() - probed_at > _PROBE_SECONDS:
            probed_at = time.monotonic()
            dead = dead_among(awaited.values(), tell)
            awaited = {
                key: member
                for key, member in awaited.items()
                if member.incarnation not in dead and not store.has(key)
            }
        if not backoff.pause():
            missing = [member for key, member in awaited.items() if not store.has(key)]
            raise RendezvousTimeoutError(
                f"the group was complete, but {_names(missing)} did not begin to serve within "
                f"{waiting.timeout:g} s. Check whether that process is stopped or overloaded."
            )


def _names(members: Iterable[Member]) -> str:
    return ", ".join(f"worker '{member.name}' (rank {member.id})" for member in members)
