"""What the functions of ``rpc`` need of an agent: whoever has these is a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rpc.agent.futures import Future
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from rpc.runtime.events import Events

__all__ = ["AgentInterface"]


class AgentInterface(Protocol):
    """An agent: what ``init_backend_handler`` of a backend returns (see ``register_backend``).

    Timeouts are in seconds; 0 for none, ``UNSET_TIMEOUT`` for the agent's default. Arguments have been
    checked: ``function`` is callable, ``args`` a tuple, ``kwargs`` a dict of the call's own. All methods may
    be called from any thread. Remote references and distributed autograd need more: farcall's own ``Agent``.

    Attributes:
        rpc_timeout: default timeout of calls; ``set_rpc_timeout`` sets it.
        events: what ``rpc.events.listen`` listens to.
    """

    rpc_timeout: float

    @property
    def events(self) -> Events: ...

    @property
    def call(self) -> Callable[..., Any]:
        """``call(to, function, args, kwargs, timeout)``: returns the value or raises."""

    def call_async(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """As ``call``, but return at once, with a future of the value."""

    def all_gather(self, value: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        """See ``rpc.all_gather``."""

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        """Name and id of a worker, by default of this one."""

    def get_worker_infos(self) -> Sequence[WorkerInfo]:
        """Name and id of everybody in the group, by id."""

    def get_debug_info(self) -> dict[str, int]:
        """Counts of what there is right now, by name."""

    def shutdown(
        self, graceful: bool, timeout: float, *, release_references: bool, raise_on_leaks: bool
    ) -> None:
        """Leave the group; see ``rpc.shutdown``. From then on the agent is not the current one: it calls
        ``rpc.runtime.current.clear_current_agent``.
        """
