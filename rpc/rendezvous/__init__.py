"""How workers find each other: a c10d store, and in it a static or a dynamic group."""

from __future__ import annotations

from rpc.rendezvous.address import host_identity, is_loopback, listen_address
from rpc.rendezvous.dynamic import DynamicGroup, join_dynamic
from rpc.rendezvous.group import Group, Place, job_key, resolve_group
from rpc.rendezvous.opening import open_store
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import SharedStore

__all__ = [
    "DynamicGroup",
    "Group",
    "Place",
    "SharedStore",
    "host_identity",
    "is_loopback",
    "job_key",
    "join_dynamic",
    "join_static",
    "listen_address",
    "open_store",
    "resolve_group",
]
