"""Sharded execution: collectives on farcall's agent, and what stands on them.

Importing it registers the backend ``farcall`` with PyTorch; everything else is imported when it is used.
"""

from __future__ import annotations

from spmd import backend

backend.register()
