"""Remote references: ``RRef``, ``remote`` and ``RemoteModule``."""

from __future__ import annotations

import farcall_guard

farcall_guard.check("rpc")

from rref.installation import install
from rref.reference import RRef, references
from rref.remote import remote
from rref.remote_module import RemoteModule

__all__ = ["RRef", "RemoteModule", "debug_info", "install", "release_all_users", "remote"]


def debug_info() -> dict[str, int]:
    """Return the number of references owned, forked and pending on this worker: ``num_owner_rrefs``,
    ``num_forks``, ``num_pending_users`` and ``num_pending_futures``.
    """
    return references().debug_info()


def release_all_users() -> None:
    """Release every reference that this worker holds to objects of other workers; it cannot be used
    afterwards.
    """
    references().release_all()
