"""What stands on every agent: packages that add message kinds, carriers or a tape to it.

An extension is a function ``install(agent)``, called before the agent joins its group. It is named, not
registered: a distribution of its own names one under the entry point group ``farcall.extensions``::

    [project.entry-points."farcall.extensions"]
    metrics = "my_package.metrics:install"
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from rpc.agent.agent import Agent

__all__ = ["GROUP", "install_extensions"]

GROUP: Final = "farcall.extensions"

_OURS: Final = (
    EntryPoint("rref", "rref.installation:install", GROUP),
    EntryPoint("dist_autograd", "dist_autograd.installation:install", GROUP),
    EntryPoint("spmd", "spmd.collectives.store:install", GROUP),
)
"""What all workers take part in: contexts of distributed autograd follow their calls, and worker 0 serves a
store to those who form process groups.
"""


def install_extensions(agent: Agent) -> None:
    """Install each extension on an agent that has not joined its group yet, our own first."""
    for extension in (*_OURS, *entry_points(group=GROUP)):
        extension.load()(agent)
