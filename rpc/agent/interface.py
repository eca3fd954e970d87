"""The interface of an agent to the functions of ``rpc``; any object that implements it can be a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rpc.agent.futures import Future
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from rpc.runtime.events import Events

__all__ = ["AgentInterface"]


class AgentInterface(Protocol):
    """An agent, as a backend's ``init_backend_handler`` returns it (see ``register_backend``).

    Timeouts are in seconds; 0 for none, ``UNSET_TIMEOUT`` for the agent's default. Arguments have been
    checked: ``function`` is callable, ``args`` a tuple, ``kwargs`` a dict, which the agent does not
    change. All methods may be called from any thread. Remote references and distributed autograd need more:
    farcall's own ``Agent``.

    Attributes:
        rpc_timeout: default timeout of calls; ``set_rpc_timeout`` sets it.
        events: the events for ``rpc.events.listen``.
    """

    rpc_timeout: float

    @property
    def events(self) -> Events: ...

    def call(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        """Call a function, wait, and return its value or raise its error."""

    def call_async(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """Like ``call``, but return a future of the value immediately."""

    def all_gather(self, value: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        """See ``rpc.all_gather``."""

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        """Return name and id of a worker, by default of this one."""

    def get_worker_infos(self) -> Sequence[WorkerInfo]:
        """Return name and id of all workers in the group, by id."""

    def get_debug_info(self) -> dict[str, int]:
        """Return current counts, by name."""

    def shutdown(
        self, graceful: bool, timeout: float, *, release_references: bool, raise_on_leaks: bool
    ) -> None:
        """Leave the group; see ``rpc.shutdown``. From then on the agent is not the current one: it calls
        ``rpc.runtime.current.clear_current_agent``.
        """
