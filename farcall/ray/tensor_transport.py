"""farcall as a tensor transport of Ray Direct Transport: shared memory on one host, TCP between hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import ray
import torch
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)
from ray.experimental import register_tensor_transport as register_with_ray

from farcall.ray.exchange import Exchange, Meeting, exchange_of
from rpc.agent.futures import Future

__all__ = ["register_tensor_transport"]

_NAME: Final = "FARCALL"

_FETCH_SECONDS: Final = 60.0
"""Maximum time, in seconds, that a fetch may take; Ray's own limit is the same by default."""


def register_tensor_transport() -> None:
    """Let actors pass CPU tensors by farcall: ``@ray.method(tensor_transport="FARCALL")``.

    Call this once, in the process that creates the actors, before their classes are defined. Actors of one
    host exchange tensors through shared memory, others over TCP, between the addresses that Ray knows of
    their nodes. The connections are authenticated by a token that is made here and travels with Ray's own
    messages.

    A tensor is copied when it is fetched. As with all tensor transports of Ray, an actor must not change a
    tensor that it has returned while others still refer to it. If the actor that holds a tensor dies, the
    task that needs it fails, with Ray's ``ActorDiedError`` or farcall's ``WorkerLostError``.

    Raises:
        ValueError: it is registered already.

    Example::

        farcall.ray.register_tensor_transport()

        @ray.remote(enable_tensor_transport=True)
        class Maker:
            @ray.method(tensor_transport="FARCALL")
            def make(self):
                return torch.ones(1 << 20)
    """
    shared = Meeting.new()

    class FarcallTransport(_FarcallTransport):  # pickled by value, with the meeting of this job
        meeting = shared

    register_with_ray(_NAME, ["cpu"], FarcallTransport, torch.Tensor)


@dataclass
class _Metadata(TensorTransportMetadata):  # type: ignore[misc]  # Ray brings no types
    """Where tensors are to be fetched."""

    source: list[Any] = field(default_factory=list)


@dataclass
class _Fetch:
    """A fetch under way, as Ray's ``FetchRequest`` is."""

    obj_id: str
    coming: Future[list[torch.Tensor]]
    target_buffers: list[torch.Tensor] | None


class _FarcallTransport(TensorTransportManager):  # type: ignore[misc]
    meeting: Meeting

    def __init__(self) -> None:
        self._fetches: dict[str, Future[list[torch.Tensor]]] = {}

    def _exchange(self) -> Exchange:
        return exchange_of(self.meeting, ray.util.get_node_ip_address())

    def tensor_transport_backend(self) -> str:
        return _NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> _Metadata:
        tensors = [tensor.detach() for tensor in rdt_object]
        devices = {tensor.device.type for tensor in tensors}
        if devices - {"cpu"}:
            raise ValueError(f"{_NAME} moves CPU tensors only, not those on {sorted(devices - {'cpu'})}")
        exchange = self._exchange()
        exchange.offer(obj_id, tensors)
        return _Metadata([(each.shape, each.dtype) for each in tensors], "cpu", exchange.me)

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: _Metadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        fetch = self.fetch_multiple_tensors(
            obj_id, tensor_transport_metadata, communicator_metadata, target_buffers
        )
        return self.wait_fetch_complete(fetch)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: _Metadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> _Fetch:
        coming = self._exchange().fetch(tensor_transport_metadata.source, obj_id, _FETCH_SECONDS)
        self._fetches[obj_id] = coming
        return _Fetch(obj_id, coming, target_buffers)

    def wait_fetch_complete(self, fetch_request: _Fetch, timeout: float = -1) -> list[torch.Tensor]:
        try:
            tensors = fetch_request.coming.wait(None if timeout < 0 else timeout)
        finally:
            self._fetches.pop(fetch_request.obj_id, None)
        if fetch_request.target_buffers:
            for target, tensor in zip(fetch_request.target_buffers, tensors, strict=True):
                target.copy_(tensor)
            return fetch_request.target_buffers
        return tensors

    def send_multiple_tensors(
        self, tensors: list[torch.Tensor], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise NotImplementedError("tensors are fetched, not sent")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[torch.Tensor]) -> None:
        self._exchange().withdraw(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        coming = self._fetches.pop(obj_id, None)
        if coming is not None:
            coming.cancel()
