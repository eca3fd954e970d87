"""Errors of elastic jobs."""

from __future__ import annotations

from rpc.errors import GroupMismatchError, RpcError

__all__ = ["ElasticError", "Finished", "JobMismatchError", "PutOut", "StateLostError", "StepFailedError"]


class ElasticError(RpcError):
    """An elastic job was used in a way that it cannot be used, or cannot go on."""


class Finished(ElasticError):
    """The job has ended; there is nothing to do for this worker.

    Attributes:
        step: number of steps that the job has committed.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step

    @classmethod
    def at(cls, step: int, worker: str) -> Finished:
        """Return the error of a worker that comes after the job's end."""
        return cls(
            f"the elastic job has ended after {step} steps: there is nothing to do for worker '{worker}'",
            step,
        )


class PutOut(ElasticError):
    """The job may go on without this worker, which must start again to take part in it."""


class JobMismatchError(ElasticError, GroupMismatchError):
    """Members were started with different models, samplers or options."""


class StateLostError(ElasticError):
    """All members that had the job's state are gone: start again, from a checkpoint."""


class StepFailedError(ElasticError):
    """A member's block has raised an exception, which ends the job on all members.

    Attributes:
        worker: the member's name.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker
