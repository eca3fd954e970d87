from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from rpc.lifecycle.backend_registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    register_backend,
)
from rpc.options import RpcBackendOptions


@pytest.fixture(autouse=True)
def forget_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test registers is gone after it."""
    monkeypatch.setattr(BackendType, "_members", dict(BackendType._members))


def _options(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def _agent(**kwargs: Any) -> tuple[str, dict[str, Any]]:
    return "an agent", kwargs


def test_registered_backend_is_a_member_as_of_an_enum() -> None:
    held = BackendType
    backend = register_backend("STUB", _options, _agent)
    assert held.STUB is held["STUB"] is held.__members__["STUB"] is backend
    assert backend in list(held)
    assert len(held) == len(list(held))
    assert "STUB" in dir(held)
    assert backend_registered("STUB")
    assert not backend_registered("OTHER")
    assert (repr(backend), backend.name) == ("BackendType.STUB", "STUB")
    assert backend.value.init_backend_handler is _agent
    assert copy.deepcopy(backend) is pickle.loads(pickle.dumps(backend)) is backend
    with pytest.raises(RuntimeError, match=r"^RPC backend STUB: already registered$"):
        register_backend("STUB", _options, _agent)


def test_unknown_backend_is_an_error_that_lists_the_known() -> None:
    register_backend("STUB", _options, _agent)
    with pytest.raises(AttributeError, match=r"'NOPE'.*STUB"):
        _ = BackendType.NOPE
    with pytest.raises(KeyError):
        BackendType["NOPE"]
    assert not hasattr(BackendType, "NOPE")


def test_options_are_constructed_by_the_backend() -> None:
    backend = register_backend("STUB", _options, _agent)
    assert construct_rpc_backend_options(backend, init_method="tcp://a:1", colour="red") == {
        "rpc_timeout": 60.0,
        "init_method": "tcp://a:1",
        "colour": "red",
    }
    backend = register_backend("PLAIN", RpcBackendOptions, _agent)
    assert construct_rpc_backend_options(backend, rpc_timeout=5).rpc_timeout == 5
