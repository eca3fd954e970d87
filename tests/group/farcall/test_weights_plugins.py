"""The adapters of the weight store for other projects, against classes that take the place of theirs."""

from __future__ import annotations

import abc
import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch

from farcall import weights
from farcall.weights import WeightsError
from farcall.weights.listening import Server

STATE = {"up": torch.arange(6.0).view(2, 3), "down": torch.ones(3, dtype=torch.bfloat16)}
I = TypeVar("I")  # noqa: E741
U = TypeVar("U")


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Have a module, and the packages that it is in, be there for imports."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        if end == len(parts):
            vars(module).update(contents)
        if module.__name__ not in sys.modules or end == len(parts):
            monkeypatch.setitem(sys.modules, module.__name__, module)


class Engine(abc.ABC, Generic[I, U]):
    """What an engine of vLLM has to define."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model = model
        self.model_config = vllm_config

    @abc.abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...
    @abc.abstractmethod
    def start_weight_update(self) -> None: ...
    @abc.abstractmethod
    def finish_weight_update(self) -> None: ...
    @abc.abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...
    @abc.abstractmethod
    def shutdown(self) -> None: ...
    @staticmethod
    @abc.abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...


class Model(dict[str, torch.Tensor]):
    def load_weights(self, named: Any) -> None:
        self.update((name, tensor.clone()) for name, tensor in named)

    def holds(self, state: dict[str, torch.Tensor]) -> bool:
        return self.keys() == state.keys() and all(torch.equal(self[name], state[name]) for name in state)


def test_vllm(store_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    calls: list[str] = []

    def register_engine(name: str, engine: Any) -> None:
        if name in registered:
            raise ValueError(name)
        registered[name] = engine

    base = {"WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    install(monkeypatch, "vllm.distributed.weight_transfer.base", WeightTransferEngine=Engine, **base)
    factory = SimpleNamespace(register_engine=register_engine)
    where = "vllm.distributed.weight_transfer.factory"
    install(monkeypatch, where, WeightTransferEngineFactory=factory)
    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: calls.append("initialize"),
        finalize_layerwise_reload=lambda model, config: calls.append("finalize"),
    )
    install(monkeypatch, "vllm.model_executor.model_loader", reload=reload)
    monkeypatch.delitem(sys.modules, "farcall.weights.vllm", raising=False)
    plugin = importlib.import_module("farcall.weights.vllm")
    plugin.register()
    model = Model()
    engine = registered["farcall"](None, None, torch.device("cpu"), model)
    with pytest.raises(WeightsError, match="has not called init_transfer_engine"):
        engine.receive_weights(engine.update_info_cls())
    engine.init_transfer_engine(engine.init_info_cls(address=store_server.address))
    engine.trainer_send_weights(iter(STATE.items()), {"address": store_server.address, "version": 7})
    with pytest.raises(TimeoutError):
        engine.receive_weights(engine.update_info_cls(version=8, timeout=0))
    assert not model, "nothing is loaded of a version that is not there"
    engine.start_weight_update()
    engine.receive_weights(engine.update_info_cls(version=7))
    engine.finish_weight_update()
    assert calls == ["initialize", "finalize"]
    assert model.holds(STATE)
    assert engine.version == 7
    older = Model()
    engine.receive_weights(engine.update_info_cls(), older.load_weights)
    assert older.holds(STATE)
    engine.shutdown()
    engine.shutdown()
    monkeypatch.delitem(sys.modules, "farcall.weights.vllm")


class CheckpointEngine(abc.ABC):
    """What a checkpoint engine of verl has to define."""

    @abc.abstractmethod
    def prepare(self) -> Any: ...
    @classmethod
    @abc.abstractmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: Any) -> Any: ...
    @abc.abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...
    @abc.abstractmethod
    def finalize(self) -> None: ...
    @abc.abstractmethod
    async def send_weights(self, weights: Any) -> None: ...
    @abc.abstractmethod
    async def receive_weights(self) -> Any: ...


def test_verl(store_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}

    def register(name: str) -> Any:
        return lambda engine: registered.setdefault(name, engine)

    registry = SimpleNamespace(register=register)
    names = {"CheckpointEngine": CheckpointEngine, "CheckpointEngineRegistry": registry}
    install(monkeypatch, "verl.checkpoint_engine.base", **names)
    monkeypatch.delitem(sys.modules, "farcall.weights.verl", raising=False)
    importlib.import_module("farcall.weights.verl")
    new = registered["farcall"]
    engines = [new(bucket_size=1 << 20, address=store_server.address) for _ in range(4)]
    trainers, rollouts = engines[:2], engines[2:]

    async def read(engine: Any, into: Model, steps: int | None) -> None:
        into.load_weights([each async for each in engine.receive_weights(global_steps=steps)])

    async def update(state: dict[str, torch.Tensor]) -> None:
        """As verl's manager does it."""
        metadata = [each.prepare() for each in engines]
        for group, how in zip((trainers, rollouts), new.build_topology(2, 2, metadata), strict=True):
            for index, engine in enumerate(group):
                engine.init_process_group(**{name: values[index] for name, values in how.items()})
        models = [Model(), Model()]
        reading = [
            asyncio.create_task(read(engine, model, 5))
            for engine, model in zip(rollouts, models, strict=True)
        ]
        passed: list[str] = []

        def weights_of() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in state.items():
                passed.append(name)
                yield name, tensor

        for engine in reversed(trainers):
            await engine.send_weights(weights_of())
        await asyncio.gather(*reading)
        assert passed == [*state, *state], "all trainers drive the generator"
        assert all(model.holds(state) for model in models)
        for engine in engines:
            engine.finalize()

    for factor in (1, 2):
        asyncio.run(update({name: tensor * factor for name, tensor in STATE.items()}))
    with weights.connect(store_server.address) as store:
        assert store.versions() == [1, 2]
        store.tag("best", 1)
    with pytest.raises(WeightsError, match="has not called init_process_group"):
        asyncio.run(trainers[0].send_weights(iter(())))

    async def newest() -> bool:
        model = Model()
        model.load_weights([each async for each in rollouts[0].get_weights()])
        return model.holds({name: tensor * 2 for name, tensor in STATE.items()})

    assert asyncio.run(newest())
    for engine in engines:
        engine._store.close()
    monkeypatch.delitem(sys.modules, "farcall.weights.verl")


class Scheme:
    """What TorchRL's schemes have."""

    def __init__(self, strategy: str) -> None:
        self._stop_event = threading.Event()


def test_torchrl_waits_no_more_if_the_store_is_gone(
    store_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "tensordict", TensorDictBase=dict)
    where = "torchrl.weight_update.weight_sync_schemes"
    install(
        monkeypatch, where, WeightSyncScheme=Scheme, register_weight_sync_backend=lambda _: lambda cls: cls
    )
    monkeypatch.delitem(sys.modules, "farcall.weights.torchrl", raising=False)
    scheme = importlib.import_module("farcall.weights.torchrl").StoreWeightSyncScheme(store_server.address)
    scheme.receiver_transport = scheme.create_transport()
    with weights.connect(store_server.address) as store:
        store.put(1, STATE)
    assert scheme._wait_for_instruction() == "receive"
    scheme.receiver_transport.last = 1
    assert scheme._wait_for_instruction(timeout=0.01) is None, "there is no other version"
    store_server.close()
    assert scheme._wait_for_instruction() is None
    assert "no more weights come from a store: store 'weights' is gone with worker" in caplog.text
    scheme.receiver_transport.close()
