"""An agent without a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import rpc
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from tests.support.streams import SOON

__all__ = ["LocalAgent"]


class LocalAgent:
    """All calls are to itself, and happen at once. If a function returns a future, that is the answer."""

    def __init__(self, name: str = "alone", rpc_timeout: float = SOON) -> None:
        self.me = WorkerInfo(name, 0)
        self.rpc_timeout = rpc_timeout

    def call(
        self, to: WorkerReference, function: Callable[..., Any], args: Any, kwargs: Any, _: float
    ) -> Any:
        return function(*args, **kwargs)

    def call_async(self, *what: Any) -> rpc.Future[Any]:
        answer: rpc.Future[Any] = rpc.Future()

        def pass_on(done: torch.futures.Future[Any]) -> None:
            try:
                answer.set_result(done.value())
            except Exception as error:
                answer.set_exception(error)

        try:
            value = self.call(*what)
        except Exception as error:
            answer.set_exception(error)
            return answer
        if isinstance(value, torch.futures.Future):
            value.add_done_callback(pass_on)
        else:
            answer.set_result(value)
        return answer

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        return self.me

    def get_worker_infos(self) -> list[WorkerInfo]:
        return [self.me]
