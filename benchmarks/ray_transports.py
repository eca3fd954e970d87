"""Tensors between two actors of Ray on one host: Ray's object store, its GLOO transport, and farcall's.

::

    python -m benchmarks.ray_transports

A round is ``ray.get(taker.take.remote(maker.make.remote()))``: two tasks, and the tensor between them. The
column *floor* is a transport that moves nothing: the time of Ray's own messages.

The second table is the transfer alone, without tasks: the time that the two actors spend in it, as they
measure it. For the object store that is ``ray.put`` at one and ``ray.get`` at the other, for GLOO ``recv`` of
a tensor whose ``send`` has begun, and for farcall what Ray's tasks call of its transport.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
from ray.experimental import register_tensor_transport as register_with_ray
from ray.experimental.collective import create_collective_group
from ray.experimental.rdt.util import get_tensor_transport_manager
from ray.util import collective

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

        def put_alone(self, size: int) -> tuple[list[Any], float]:
            began = time.perf_counter()
            reference = ray.put(self.made[size])
            return [reference], time.perf_counter() - began

        def send_alone(self, size: int, group: str) -> None:
            collective.send(self.made[size], 1, group)

        def offer_alone(self, size: int, key: str) -> tuple[Any, float]:
            transport = get_tensor_transport_manager("FARCALL")
            began = time.perf_counter()
            metadata = transport.extract_tensor_transport_metadata(key, [self.made[size]])
            return metadata, time.perf_counter() - began

        def withdraw_alone(self, key: str) -> None:
            get_tensor_transport_manager("FARCALL").garbage_collect(key, None, [])

    class Taker:
        def take(self, tensor: torch.Tensor) -> float:
            return float(tensor[0] + tensor[-1])

        def get_alone(self, boxed: list[Any]) -> float:
            began = time.perf_counter()
            tensor = ray.get(boxed[0])
            return self._check(tensor, began)

        def receive_alone(self, size: int, group: str) -> float:
            tensor = torch.empty(size * _MIB // 4)
            began = time.perf_counter()
            collective.recv(tensor, 0, group)
            return self._check(tensor, began)

        def fetch_alone(self, key: str, metadata: Any) -> float:
            transport = get_tensor_transport_manager("FARCALL")
            began = time.perf_counter()
            (tensor,) = transport.recv_multiple_tensors(key, metadata, CommunicatorMetadata())
            return self._check(tensor, began)

        def _check(self, tensor: torch.Tensor, began: float) -> float:
            seconds = time.perf_counter() - began
            assert self.take(tensor) == 2
            return seconds

    remote = ray.remote(num_cpus=0, enable_tensor_transport=True)
    return remote(Maker).remote(), remote(Taker).remote()


def _round(make: Any, taker: Any, size: int) -> Callable[[], object]:
    return lambda: ray.get(taker.take.remote(make.remote(size)))


def _alone(maker: Any, taker: Any, size: int, group: str) -> dict[str, Callable[[], float]]:
    """How each way moves one tensor without tasks; each returns seconds."""
    keys = (f"alone-{number}" for number in itertools.count())

    def store() -> float:
        boxed, seconds = ray.get(maker.put_alone.remote(size))
        return float(seconds + ray.get(taker.get_alone.remote(boxed)))

    def gloo() -> float:
        sending = maker.send_alone.remote(size, group)
        seconds = float(ray.get(taker.receive_alone.remote(size, group)))
        ray.get(sending)
        return seconds

    def by_farcall() -> float:
        key = next(keys)
        metadata, seconds = ray.get(maker.offer_alone.remote(size, key))
        seconds += ray.get(taker.fetch_alone.remote(key, metadata))
        ray.get(maker.withdraw_alone.remote(key))
        return float(seconds)

    return {"store": store, "gloo": gloo, "farcall": by_farcall}


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return timed


def _median(run: Callable[[], float]) -> float:
    """Median of the seconds that a round returns, in milliseconds."""
    for _ in range(5):
        run()
    return 1e3 * statistics.median(run() for _ in range(_ROUNDS))


def main() -> None:
    """Print a table, in milliseconds, and farcall's ratios to the others."""
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=2 << 30, logging_level="error")
    farcall.ray.register_tensor_transport()
    register_with_ray("NOTHING", ["cpu"], _Nothing, torch.Tensor)
    maker, taker = _actors()
    group = create_collective_group([maker, taker], backend="gloo").name
    print(f"Ray {ray.__version__}, PyTorch {torch.__version__}, medians of {_ROUNDS} rounds, ms")
    _print_header("two tasks and the tensor between them", "floor")
    for size in _SIZES:
        names = ("store", "gloo", "farcall", "floor")
        _print_row(size, {name: _median(_timed(_round(getattr(maker, name), taker, size))) for name in names})
    _print_header("the transfer alone", "")
    for size in _SIZES:
        runs = _alone(maker, taker, size, group)
        _print_row(size, {name: _median(run) for name, run in runs.items()})


def _print_header(title: str, last: str) -> None:
    print(f"\n{title}")
    print(f"{'MiB':>4} {'store':>8} {'GLOO':>8} {'farcall':>8} {last:>8}   {'/store':>7} {'/GLOO':>7}")


def _print_row(size: int, found: dict[str, float]) -> None:
    ratios = [found["farcall"] / found[name] for name in ("store", "gloo")]
    shown = " ".join(f"{milliseconds:8.2f}" for milliseconds in found.values())
    print(f"{size:4} {shown:35}   {ratios[0]:7.3f} {ratios[1]:7.3f}", flush=True)


if __name__ == "__main__":
    main()
