"""A profile of all requests that this worker runs."""

from __future__ import annotations

from typing import Any, Literal

from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from rpc.profiling.installation import call_profiler, settings_of

__all__ = ["ServerProfile"]


class ServerProfile(profiler_legacy.profile):
    """Profiles all requests of other workers, on all threads of this one, inside a ``with`` block.

    Arguments are those of ``torch.autograd.profiler_legacy.profile``. Requests that end in the block are
    included.

    Attributes:
        function_events: all events, as an ``EventList``.
        process_global_function_events: the same, a list for each request.

    Raises:
        NotInitializedError: there is no agent.

    Example::

        profile = rpc.remote("worker1", ServerProfile)
        profile.rpc_sync().__enter__()
        rpc.rpc_sync("worker1", torch.add, args=(x, y))
        profile.rpc_sync().__exit__(None, None, None)
        print(profile.rpc_sync().key_averages())
    """

    process_global_function_events: list[list[FunctionEvent]]

    def __enter__(self) -> Any:
        if not self.enabled:
            return self
        if self.entered:
            raise RuntimeError("a server-wide profile can be entered once")
        self.entered = True
        self.process_global_function_events = []
        call_profiler().watch(self.process_global_function_events, settings_of(self))
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        if self.enabled:
            call_profiler().unwatch(self.process_global_function_events)
            events = [event for each in self.process_global_function_events for event in each]
            self.function_events = EventList(  # type: ignore[no-untyped-call]
                events, use_device=None, profile_memory=self.profile_memory
            )
            self.function_events._build_tree()  # type: ignore[no-untyped-call]
        return False
