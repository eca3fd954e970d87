from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from rpc.options import (
    AgentOptions,
    GrpcRpcBackendOptions,
    InvalidOptionError,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    parse_listen,
)

CUDA = [torch.device("cuda", index) for index in range(3)]


def test_subclass_may_call_the_base_directly_and_add_attributes() -> None:
    class Own(RpcBackendOptions):
        def __init__(self) -> None:
            RpcBackendOptions.__init__(self)
            self.init_method = "tcp://somewhere:1"
            self.flavour = 3

    assert Own().init_method == "tcp://somewhere:1"


def test_options_can_be_changed_and_have_pytorchs_defaults() -> None:
    options = AgentOptions(init_method="file:///tmp/x")
    assert (options.num_worker_threads, options.rpc_timeout) == (16, 60.0)
    options.rpc_timeout = 5
    options.init_method += "init_2"
    assert (options.rpc_timeout, options.init_method) == (5.0, "file:///tmp/xinit_2")
    assert "num_worker_threads=16" in repr(options)


def test_pytorchs_options_take_pytorchs_arguments_and_only_those() -> None:
    options = TensorPipeRpcBackendOptions(
        num_worker_threads=4,
        rpc_timeout=9,
        init_method="env://",
        device_maps={"w": {"cuda:0": "cuda:1"}},
        devices=["cuda:0"],
        _transports=["uv"],
        _channels=["basic"],
    )
    assert isinstance(options, AgentOptions)
    assert options.device_maps == {"w": {CUDA[0]: CUDA[1]}}
    with pytest.raises(TypeError):
        TensorPipeRpcBackendOptions(16)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        TensorPipeRpcBackendOptions(unheard_of=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rpc_timeout", -1),
        ("rpc_timeout", float("nan")),
        ("rpc_timeout", float("inf")),
        ("num_worker_threads", 0),
        ("rendezvous_timeout", 0),
        ("switch_interval", 0),
        ("send_queue_bytes", 0),
        ("max_message_bytes", -1),
        ("listen", "host:port"),
        ("deserialization", "marshal"),
        ("transports", []),
        ("transports", ["tcp", "pigeon"]),
    ],
)
def test_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidOptionError, match=name):
        AgentOptions(**{name: value})  # type: ignore[arg-type]
    options = AgentOptions()
    with pytest.raises(ValueError, match=name):
        setattr(options, name, value)


def test_the_backend_grpc_uses_no_socket_of_ours_unless_asked_to() -> None:
    assert GrpcRpcBackendOptions().transports == ("grpc",)
    assert GrpcRpcBackendOptions(transports=None).transports == ("grpc",)
    assert GrpcRpcBackendOptions(transports=["unix", "grpc"]).transports == ("unix", "grpc")
    with pytest.raises(InvalidOptionError, match="'grpc' for the backend GRPC"):
        GrpcRpcBackendOptions(transports=["tcp"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rpc_timeout", timedelta()),
        ("rpc_timeout", "60"),
        ("init_method", 5),
        ("num_worker_threads", 2.5),
        ("dynamic", 1),
        ("listen", 8080),
        ("kept_memory_bytes", 0.5),
    ],
)
def test_value_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"incompatible constructor arguments: {name}"):
        AgentOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("host", ("host", 0)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("0.0.0.0", ("0.0.0.0", 0)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[fe80::1]:443", ("fe80::1", 443)),
    ],
)
def test_listen_names_a_host_and_perhaps_a_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_listen(text) == parsed


@pytest.mark.parametrize("text", ["", ":80", "a b", "host:70000", "host:-1", "[::1", "[::1]80", "[]:80"])
def test_listen_that_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="listen"):
        parse_listen(text)


def test_device_maps_grow_call_by_call() -> None:
    options = AgentOptions(device_maps={"a": {"cuda:0": "cuda:1"}})
    options.set_device_map("a", {"cuda:1": "cuda:0"})
    options.set_device_map("a", {"cuda:1": "cuda:0"})
    options.set_device_map("b", {"cuda:0": "cuda:0"})
    assert options.device_maps == {"a": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[0]}, "b": {CUDA[0]: CUDA[0]}}


def test_device_mapped_twice_is_refused_and_changes_nothing() -> None:
    options = AgentOptions(device_maps={"a": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match=r"`set_device_map` only supports 1-to-1 mapping.*cuda:0"):
        options.set_device_map("a", {"cuda:2": "cuda:2", "cuda:0": "cuda:0"})
    assert options.device_maps == {"a": {CUDA[0]: CUDA[1]}}


def test_what_is_read_is_a_copy() -> None:
    options = AgentOptions(device_maps={"a": {"cuda:0": "cuda:1"}}, devices=["cuda:0"])
    options.device_maps["a"].clear()
    options.devices.clear()
    assert options.device_maps == {"a": {CUDA[0]: CUDA[1]}}
    assert options.devices == [CUDA[0]]


def test_devices_are_cuda_devices() -> None:
    options = AgentOptions()
    options.set_devices(["cuda:0", CUDA[1]])
    assert options.devices == CUDA[:2]
    with pytest.raises(ValueError, match=r"CUDA devices only, got .* 'cpu'"):
        options.devices = ["cpu"]
