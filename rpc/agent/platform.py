"""The platform of an agent: its threads, its transports, the settings of its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from rpc.options import AgentOptions
from rpc.runtime.executor import Executor
from rpc.runtime.loop import LoopThread
from rpc.runtime.process_signs import waited_for_core
from rpc.runtime.process_tuning import ProcessTuning
from rpc.transport.authentication import TokenAuthenticator
from rpc.transport.base import Transport, TransportContext
from rpc.transport.registry import transports as make_transports
from rpc.transport.tls import TlsContexts

__all__ = ["Platform"]


@dataclass(frozen=True)
class Platform:
    """The threads, sockets and clock that an agent runs on. A simulation replaces them."""

    loop_thread: LoopThread
    executor: Executor
    transports: Mapping[str, Transport]
    """The transports by scheme, best first."""
    process: ProcessTuning
    waited_for_core: Callable[[], float] = float
    """Returns for how many seconds the calling thread has waited for a core; 0 if that is unknown."""

    @classmethod
    def of_process(
        cls,
        options: AgentOptions,
        transports: Iterable[str] | None,
        tls: TlsContexts | None,
        authenticator: TokenAuthenticator | None,
    ) -> Self:
        """Make the platform for a real process; arguments as for ``Agent``."""
        process = ProcessTuning(options.switch_interval, options.kept_memory_bytes)
        thread = LoopThread("farcall-loop", "a blocking call on the agent's thread would stop it")
        executor = Executor(options.num_worker_threads, "farcall", options.max_worker_threads)
        context = TransportContext(
            thread.loop, options.send_queue_bytes, tls=tls, tickets=authenticator, options=options
        )
        return cls(thread, executor, make_transports(context, transports), process, waited_for_core)
