"""Tensors between two actors of Ray on one host: Ray's object store, its GLOO transport, and farcall's.

::

    python -m benchmarks.ray_transports

A round is ``ray.get(taker.take.remote(maker.make.remote()))``: two tasks, and the tensor between them. The
column *floor* is a transport that moves nothing: the time of Ray's own messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
from ray.experimental import register_tensor_transport as register_with_ray
from ray.experimental.collective import create_collective_group

import farcall.ray

_MIB = 1 << 20
_SIZES = (1, 64)
_ROUNDS = 30


class _Nothing(TensorTransportManager):  # type: ignore[misc]  # Ray brings no types
    def tensor_transport_backend(self) -> str:
        return "NOTHING"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: Any) -> TensorTransportMetadata:
        return TensorTransportMetadata([(each.shape, each.dtype) for each in rdt_object], "cpu")

    def get_communicator_metadata(self, *_: Any) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, obj_id: str, metadata: Any, *_: Any) -> list[torch.Tensor]:
        return [torch.empty(1).expand(shape) for shape, _ in metadata.tensor_meta]

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError

    def garbage_collect(self, *_: Any) -> None: ...

    def abort_transport(self, *_: Any) -> None: ...


def _actors() -> tuple[Any, Any]:
    class Maker:
        def __init__(self) -> None:
            self.made = {size: torch.ones(size * _MIB // 4) for size in _SIZES}

        def store(self, size: int) -> torch.Tensor:
            return self.made[size]

        @ray.method(tensor_transport="GLOO")  # type: ignore[untyped-decorator]
        def gloo(self, size: int) -> torch.Tensor:
            return self.made[size]

        @ray.method(tensor_transport="FARCALL")  # type: ignore[untyped-decorator]
        def farcall(self, size: int) -> torch.Tensor:
            return self.made[size]

        @ray.method(tensor_transport="NOTHING")  # type: ignore[untyped-decorator]
        def floor(self, size: int) -> torch.Tensor:
            return self.made[size]

    class Taker:
        def take(self, tensor: torch.Tensor) -> float:
            return float(tensor[0] + tensor[-1])

    remote = ray.remote(num_cpus=0, enable_tensor_transport=True)
    return remote(Maker).remote(), remote(Taker).remote()


def _round(make: Any, taker: Any, size: int) -> Callable[[], object]:
    return lambda: ray.get(taker.take.remote(make.remote(size)))


def _median(run: Callable[[], object]) -> float:
    """Median of the time of a round, in milliseconds."""
    for _ in range(5):
        run()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Print a table, in milliseconds, and farcall's ratios to the others."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=2 << 30, logging_level="error")
    farcall.ray.register_tensor_transport()
    register_with_ray("NOTHING", ["cpu"], _Nothing, torch.Tensor)
    maker, taker = _actors()
    create_collective_group([maker, taker], backend="gloo")
    print(f"Ray {ray.__version__}, PyTorch {torch.__version__}, medians of {_ROUNDS} rounds, ms")
    print(f"{'MiB':>4} {'store':>8} {'GLOO':>8} {'farcall':>8} {'floor':>8}   {'/store':>7} {'/GLOO':>7}")
    for size in _SIZES:
        names = ("store", "gloo", "farcall", "floor")
        found = {name: _median(_round(getattr(maker, name), taker, size)) for name in names}
        ratios = [found["farcall"] / found[name] for name in ("store", "gloo")]
        shown = " ".join(f"{milliseconds:8.2f}" for milliseconds in found.values())
        print(f"{size:4} {shown:35}   {ratios[0]:7.3f} {ratios[1]:7.3f}", flush=True)


if __name__ == "__main__":
    main()
