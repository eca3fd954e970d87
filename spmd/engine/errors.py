"""Errors of SPMD mode."""

from __future__ import annotations

from rpc.errors import RpcError

__all__ = ["AlreadyInSpmdModeError", "NotInSpmdModeError", "OperationError", "ReshardingError", "SpmdError"]


class SpmdError(RpcError):
    """The base of this mode's errors."""


class NotInSpmdModeError(SpmdError):
    """There is no SPMD mode: ``use_spmd`` has not been called, or ``shutdown`` has."""


class AlreadyInSpmdModeError(SpmdError):
    """``use_spmd`` has been called."""


class ReshardingError(SpmdError):
    """An operation inside ``spmd.strict()`` needed another layout of a tensor."""


class OperationError(SpmdError):
    """An operation has failed on the workers. Its cause is the error raised there.

    Attributes:
        where: line of the program that has called it.
        operator: its name.
    """

    def __init__(self, message: str, where: str = "", operator: str = "") -> None:
        super().__init__(message)
        self.where, self.operator = where, operator
