"""PyTorch's suite of process groups, over gloo or over the backend ``farcall`` in gloo's place.

Most of its tests ask for gloo by name, so farcall's groups are made where gloo's would be: everything above
that, from names to checks, is PyTorch's as it is for gloo.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_utils import TestCase

_WORLD_SIZE: Final = 4
_LARGE_WORLD_SIZE: Final = 8

with mock.patch.dict(
    os.environ, {"BACKEND": "gloo", "WORLD_SIZE": str(_WORLD_SIZE), "INIT_METHOD": "file://"}
):
    from torch.testing._internal.distributed import distributed_test
_TIMEOUT: Final = timedelta(seconds=30)
_NEEDS_GPUS: Final = {"skip_if_no_gpu", "skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"}


class GroupsTest(distributed_test.DistributedTest._DistTestBase, TestCase):
    """The suite, for the harness of this folder. What it does before and after a test is what PyTorch does.

    Attributes:
        rank, file_name: set by the harness.
    """

    __test__ = False  # pytest is not to find it where it is imported
    rank = -1
    file_name = ""

    @property
    def world_size(self) -> int:
        """Tests that PyTorch skips in small worlds get a large one."""
        is_large = "skip_if_small_worldsize" in _decorators(getattr(type(self), self._testMethodName))
        return _LARGE_WORLD_SIZE if is_large else _WORLD_SIZE

    @property
    def needs_gpus(self) -> bool:
        """Whether PyTorch skips the test without GPUs, after forming a group that is not used."""
        return bool(_NEEDS_GPUS & _decorators(getattr(type(self), self._testMethodName)))

    @property
    def init_method(self) -> str:
        """Where the ranks meet."""
        return f"file://{self.file_name}"

    def run_rank(self, folder: Path) -> None:
        """Run one rank's part of the test."""
        os.environ |= {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(self.world_size),
            "TEMP_DIR": str(folder),
            "MASTER_ADDR": "localhost",
        }
        distributed_test.INIT_METHOD = f"file://{folder / 'another store'}"
        for name in ("barrier", "test_dir", "init_dir"):
            (folder / name).mkdir(exist_ok=True)
        self.special_return_code_checks: dict[Any, Any] = {}
        self.skip_return_code_checks: list[Any] = []
        limit = distributed_test.CUSTOM_PG_TIMEOUT.get(self._testMethodName)
        dist.init_process_group(
            "gloo",
            init_method=self.init_method,
            world_size=self.world_size,
            rank=self.rank,
            timeout=_TIMEOUT if limit is None else timedelta(seconds=limit),
        )
        self._barrier()  # type: ignore[no-untyped-call]
        getattr(self, self._testMethodName)()
        self._barrier()  # type: ignore[no-untyped-call]


def _decorators(function: Any) -> set[str]:
    """Which functions have decorated a function."""
    names = set()
    while hasattr(function, "__wrapped__"):
        names.add(function.__code__.co_qualname.partition(".")[0])
        function = function.__wrapped__
    return names


@contextlib.contextmanager
def in_place_of_gloo() -> Iterator[None]:
    """Has PyTorch make farcall's groups where it would make gloo's."""
    from spmd.collectives import profiling
    from spmd.collectives.creation import create
    from spmd.collectives.process_group import FarcallProcessGroup

    make_group = distributed_c10d._new_process_group_helper
    parameters = inspect.signature(make_group)
    wanted: dict[str, Any] = {}

    def note(*args: Any, **kwargs: Any) -> Any:
        """Keeps the group's name and ranks, which gloo is not told when it is made."""
        wanted.update(parameters.bind(*args, **kwargs).arguments)
        return make_group(*args, **kwargs)

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, FarcallProcessGroup)

    class StandIn(metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any) -> Any:
            options: Any = distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
            options.store, options.timeout = store, timeout
            options.group_rank, options.group_size = rank, size
            options.group_id = wanted["group_name"]
            options.global_ranks_in_group = wanted["global_ranks_in_group"]
            group: Any = create(options, None)
            group._set_sequence_number_for_group = lambda: None
            return group

    with (
        mock.patch.object(distributed_c10d, "_new_process_group_helper", note),
        mock.patch.object(distributed_c10d, "ProcessGroupGloo", StandIn),
        mock.patch.object(profiling, "PREFIX", "gloo:"),
    ):
        yield
