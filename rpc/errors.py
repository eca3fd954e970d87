"""Every error that a user of farcall can see, in one small hierarchy.

Each class also derives from what PyTorch (or Python itself) raises in the same place, so that an
``except`` clause written for ``torch.distributed.rpc`` keeps working: everything is a ``RuntimeError``,
a timeout is also a ``TimeoutError``, a lost worker also a ``ConnectionError``.
"""

from __future__ import annotations

__all__ = [
    "AlreadyInitializedError",
    "AutogradError",
    "BackwardError",
    "BlockingCallError",
    "ForkedProcessError",
    "FunctionNotFoundError",
    "GivenUpError",
    "GroupMismatchError",
    "InvalidNameError",
    "InvalidOptionError",
    "MessageLostError",
    "MissingInternalError",
    "NameTakenError",
    "NoMemoryError",
    "NotAdmittedError",
    "NotInitializedError",
    "ProtocolError",
    "RRefError",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "UnknownWorkerError",
    "WorkerLostError",
]


def with_article(kind: type | str) -> str:
    """The name of a type in an error's message: "an int", "a list"; "u" as in "unit"."""
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{'an' if name[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {name}"


class RpcError(RuntimeError):
    """Base of all errors that farcall itself raises."""


class NotInitializedError(RpcError):
    """A call was made before ``init_rpc`` or after ``shutdown``."""


class AlreadyInitializedError(RpcError):
    """``init_rpc`` was called while an agent is running in this process."""


class ForkedProcessError(NotInitializedError):
    """A forked child used the agent of its parent, which the child does not have."""


class BlockingCallError(RpcError):
    """A blocking call was made on a thread that must not block (inside an ``async def`` callee)."""


class InvalidOptionError(RpcError, ValueError):
    """An option was given a value that it cannot have."""


class InvalidNameError(RpcError, ValueError):
    """A name of a worker or an object is empty, too long or has characters that names may not have."""


class NameTakenError(RpcError, ValueError):
    """Two objects have, or would have, the same name: see ``rpc.find``."""


class UnknownWorkerError(RpcError, ValueError):
    """A callee was named that is not in the group."""


class RendezvousError(RpcError):
    """The workers could not form a group."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The group was not complete, or the store not reachable, in time."""


class NotAdmittedError(RendezvousError):
    """This worker can reach none of the members of the dynamic group that it wants to join."""


class GroupMismatchError(RendezvousError, ValueError):
    """Workers disagree about the group: a rank or name taken twice, different world sizes."""


class SerializationError(RpcError, TypeError):
    """An argument or a result cannot be sent; the message says which one, its type, and why."""


class FunctionNotFoundError(RpcError, AttributeError):
    """The callee cannot import a function or class that the message names."""


class RemoteError(RpcError):
    """A remote exception that cannot be raised as itself: its class is missing here or won't unpickle.

    Attributes:
        remote_type: the qualified name of the exception's class on the callee.
        remote_traceback: the callee's formatted traceback.
    """

    def __init__(self, message: str, remote_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class RpcTimeoutError(RpcError, TimeoutError):
    """A call did not finish within its timeout."""


class WorkerLostError(RpcError, ConnectionError):
    """A worker is gone: it died, was cut off, or left while something was expected of it.

    Attributes:
        worker: the name of the lost worker.
        reason: why it is held to be lost.
    """

    def __init__(self, message: str, worker: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.reason = reason


class MessageLostError(RpcError, ConnectionError):
    """A large message was lost with its connection, and both workers live: small ones are sent again, those
    that go in chunks are not. The text says whether the call ran.

    Attributes:
        worker: the name of the worker that it was for.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class NoMemoryError(RpcError, MemoryError):
    """There was no memory for a large message where it arrived: a call, which has not run, or an answer. Its
    call ends; the connection is used further.
    """


class GivenUpError(RpcError):
    """Work was given up because something else has failed: another worker was lost, or reports its own error.

    A callee that raises it is not at fault. The log of its worker has the line at level INFO, without a
    traceback.
    """


class MissingInternalError(RpcError, AttributeError):
    """The installed version of PyTorch does not have a private name that this needs."""


class AutogradError(RpcError):
    """Distributed autograd cannot do this: there is no such context, or a root that it cannot begin from."""


class BackwardError(AutogradError):
    """A worker's part of a distributed backward failed; its ``__cause__`` is the error raised there.

    Attributes:
        worker: the name of the worker.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class RRefError(RpcError):
    """A remote reference cannot be used: wrong worker, failed creation, or its agent is gone."""


class ProtocolError(RpcError):
    """A peer sent bytes that this version of the protocol does not allow."""


def is_violation(error: BaseException) -> bool:
    """Whether an error that was raised while a message was handled says that the message is wrong. If not,
    this process lacks memory, threads or file descriptors, or has a defect: the sender must not be cut off.
    """
    return isinstance(error, RpcError) and not isinstance(error, MemoryError)
