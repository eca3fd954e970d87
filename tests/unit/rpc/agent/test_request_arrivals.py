"""A request that has been read keeps nothing of what travelled beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rpc.agent.request_runner import Request, RequestRunner
from rpc.agent.tape import Tracing
from rpc.runtime.events import Events
from rpc.wire.frames import Frame, Kind


class Codec:
    def load_call(self, header: Any, buffers: Any, arrivals: Any, peer: Any, *, connect: Any) -> Any:
        return id, (arrivals["rref"][0],), {}


def test_who_still_knows_of_a_request_keeps_no_reference_alive() -> None:
    serializer: Any = SimpleNamespace(codecs={0: Codec()}, adopt=None)
    unused: Any = None
    runner = RequestRunner(unused, serializer, Tracing(), Events(), unused, unused, unused, unused)
    peer: Any = SimpleNamespace(name="worker1")
    reference = object()
    request = Request(peer, Frame(Kind.CALL, 1, {}, [b""], 0), {"rref": [reference]})
    assert runner.load(request)[1] == (reference,)
    assert request.arrivals is None
