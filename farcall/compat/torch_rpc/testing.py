"""Stands in for ``torch.distributed.rpc._testing``: ``FAULTY_TENSORPIPE``, over ``rpc.testing.faults``.

PyTorch's agent sends what fails again if its kind is one of four that references and autograd rely on. Ours
have no such messages one by one: what must arrive travels together, or over a connection that loses nothing.
So a kind that PyTorch names means the messages of ours that do its work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dist_autograd.backward_messages import GRADIENTS
from dist_autograd.contexts import OVER
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.agent.agent import Agent
from rpc.errors import InvalidOptionError
from rpc.lifecycle.backend_registry import BackendType, BackendValue
from rpc.lifecycle.own_backend import start_agent
from rpc.options import TensorPipeRpcBackendOptions
from rpc.testing.faults import Faults
from rref.requests import CREATE, FETCH

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]

__path__: Final[list[str]] = []
"""Marks it as a package, like PyTorch's, so that importing a submodule fails with the usual error."""

BACKEND: Final = "FAULTY_TENSORPIPE"

FaultyTensorPipeAgent = Agent


def _is_operator(asked: str) -> bool:
    """Whether the called function is an operator of PyTorch's, or a script."""
    return asked.startswith(("torch.", "_VariableFunctions")) or asked == "ScriptFunction"


def _is_python(asked: str) -> bool:
    return not _is_operator(asked)


_MESSAGES: Final[dict[str, tuple[str | int, Callable[[str], bool] | None]]] = {
    "SCRIPT_CALL": ("call", _is_operator),
    "PYTHON_CALL": ("call", _is_python),
    "SCRIPT_REMOTE_CALL": (CREATE, _is_operator),
    "PYTHON_REMOTE_CALL": (CREATE, _is_python),
    "SCRIPT_RREF_FETCH_CALL": (FETCH, None),
    "PYTHON_RREF_FETCH_CALL": (FETCH, None),
    "SCRIPT_RET": ("reply", None),
    "PYTHON_RET": ("reply", None),
    "REMOTE_RET": ("reply", None),
    "SCRIPT_RREF_FETCH_RET": ("reply", None),
    "PYTHON_RREF_FETCH_RET": ("reply", None),
    "EXCEPTION": ("failure", None),
    "RREF_FORK_REQUEST": ("rref.confirm", None),
    "RREF_CHILD_ACCEPT": ("rref.accepted", None),
    "RREF_USER_DELETE": ("rref.delete", None),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": (OVER, None),
    "BACKWARD_AUTOGRAD_REQ": (GRADIENTS, None),
}
"""Our counterpart of each of PyTorch's kinds, and its functions."""


@dataclass(eq=False, kw_only=True)
class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of an agent some of whose messages fail, or are late.

    Args:
        messages_to_fail: names of PyTorch's kinds of message, each of which fails at first.
        messages_to_delay: for some kinds, how late they are sent, in seconds.
        num_fail_sends: how often a message of those fails, before it is sent; a request is not sent again.

    Raises:
        InvalidOptionError: a kind that means nothing here.

    Example::

        options = FaultyTensorPipeRpcBackendOptions(
            messages_to_fail=["RREF_USER_DELETE"], messages_to_delay={"PYTHON_CALL": 1.5}, num_fail_sends=3
        )
        rpc.init_rpc("worker0", BackendType["FAULTY_TENSORPIPE"], 0, 2, options)
    """

    messages_to_fail: Sequence[str] = ()
    messages_to_delay: Mapping[str, float] = field(default_factory=dict)
    num_fail_sends: int = 0

    def __post_init__(self, *unused: Any) -> None:
        unknown = sorted({*self.messages_to_fail, *self.messages_to_delay} - _MESSAGES.keys())
        if unknown:
            raise InvalidOptionError(
                f"{', '.join(unknown)}: no kinds of message that can fail here; there are "
                f"{', '.join(_MESSAGES)}"
            )


def is_available() -> bool:
    """Whether there is the backend: there is, since ``farcall.compat.install()``."""
    return BACKEND in BackendType.__members__


def register() -> None:
    """Have ``BackendType`` offer the backend."""
    value = BackendValue(FaultyTensorPipeRpcBackendOptions, _start)
    BackendType._members.setdefault(BACKEND, BackendType(BACKEND, value))


def deregister() -> None:
    """Undo ``register``."""
    BackendType._members.pop(BACKEND, None)


@functools.wraps(start_agent)
def _start(*, rpc_backend_options: FaultyTensorPipeRpcBackendOptions, **place: Any) -> Agent:
    """Start our agent and have its messages fail: the ``init_backend`` handler."""
    agent = start_agent(rpc_backend_options=rpc_backend_options, **place)
    faults, options = Faults(), rpc_backend_options
    if options.num_fail_sends > 0:
        for name in options.messages_to_fail:
            kind, what = _MESSAGES[name]
            faults.fail(kind, what=what, attempts=options.num_fail_sends)
    for name, seconds in options.messages_to_delay.items():
        kind, what = _MESSAGES[name]
        faults.delay(kind, what=what, seconds=seconds)
    faults.install(agent)
    return agent


__getattr__ = without_counterpart("torch.distributed.rpc._testing")
