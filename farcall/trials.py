"""``farcall doctor``: does each part of farcall work here, with these versions? A trial takes seconds."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

import rpc
import spmd
from farcall.doctor import Finding
from farcall.extras import install_command

__all__ = ["TRIALS", "Trial", "pytorch"]

_OLDEST, _NEWEST = "2.13", "2.15"
_SECONDS: Final = 20.0
"""How long a trial may wait for anything."""
_ENVIRONMENT: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a job that the command was started in; the trials are jobs of their own."""
_OBSERVE: Final = "FARCALL_OBSERVE"


class _Wrong(Exception):
    """A result is not what it must be."""


def pytorch() -> Finding:
    """Which PyTorch is installed, and whether it is one that farcall was tested with."""
    version = torch.torch_version.TorchVersion(torch.__version__)
    found, remedy = f"PyTorch {version}", ""
    if version < _OLDEST:
        remedy = f"Install PyTorch {_OLDEST} or newer: older ones are not tested."
    elif ".".join(version.split(".")[:2]) not in (_OLDEST, "2.14", _NEWEST):
        found += f", which is newer than the versions that this farcall was tested with, up to {_NEWEST}"
    return Finding("PyTorch", found.removeprefix("PyTorch "), remedy)


@dataclass(frozen=True)
class Trial:
    """One part of farcall, tried.

    Attributes:
        what: the part.
        attempt: uses it; raises if it does not work.
        needs: a module without which it was not meant to work.
        remedy: how to install that.
    """

    what: str
    attempt: Callable[[], object]
    needs: str = ""
    remedy: str = ""

    def run(self) -> Finding:
        """Try it."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return Finding(self.what, "not installed", self.remedy, optional=True)
        before = time.monotonic()
        try:
            with _own_environment():
                self.attempt()
        except Exception as error:
            lines = str(error).strip().splitlines()
            said = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
            return Finding(
                self.what,
                f"no: {said}",
                "Run `FARCALL_LOG=debug farcall doctor` for more; `farcall env` prints what a report needs.",
            )
        return Finding(self.what, f"work ({time.monotonic() - before:.1f} s)")


@contextmanager
def _own_environment() -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in (*_ENVIRONMENT, _OBSERVE) if name in os.environ}
    os.environ[_OBSERVE] = "0"  # trials are not among the user's jobs
    try:
        yield
    finally:
        del os.environ[_OBSERVE]
        os.environ.update(kept)


def _call(backend: str) -> None:
    with tempfile.TemporaryDirectory(prefix="farcall-doctor-") as folder:
        kind = rpc.BackendType.__members__[backend]
        options = kind.value.construct_rpc_backend_options_handler(
            init_method=f"file://{Path(folder, 'store')}", rpc_timeout=_SECONDS, rendezvous_timeout=_SECONDS
        )
        rpc.init_rpc("doctor", backend=kind, rank=0, world_size=1, rpc_backend_options=options)
        try:
            if rpc.rpc_sync("doctor", torch.add, args=(torch.ones(2), 1)).tolist() != [2, 2]:
                raise _Wrong("a call returned another value than the function")
        finally:
            rpc.shutdown(graceful=False)


@contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group(
        "farcall", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=_SECONDS)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collectives() -> None:
    with _process_group():
        x = torch.ones(3)
        dist.all_reduce(x)
        if not x.eq(1).all():
            raise _Wrong("all_reduce changed the tensor of a group of one rank")


def _layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def _tensor_parallel() -> None:
    from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plain, x = _layer(), torch.ones(2, 4)
    expected = plain(x)
    expected.sum().backward()
    with _process_group():
        mesh = init_device_mesh("cpu", (1,))
        layer = parallelize_module(_layer(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        result = layer(x)
        result.sum().backward()
        _same(result, expected)


def _spmd_step() -> None:
    plain, x = _layer(), torch.ones(2, 4)
    expected = plain(x).detach()
    logging.getLogger("rpc.runtime.notices").setLevel(logging.ERROR)  # the command says what it tries
    spmd.use_spmd(workers=1)
    try:
        model = plain.to(spmd.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        result = model(x.to(spmd.device()))
        result.sum().backward()
        optimizer.step()
        spmd.sync()
        _same(result.cpu(), expected)
    finally:
        spmd.shutdown()


def _same(result: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.allclose(result, expected, atol=1e-5):
        raise _Wrong(f"the result differs by {(result - expected).abs().max():g} from that of one device")


TRIALS: Final = (
    Trial("calls", partial(_call, "FARCALL")),
    Trial(
        "calls over gRPC", partial(_call, "GRPC"), "grpc_reflection", f"For this: {install_command('grpc')}"
    ),
    Trial("process groups", _collectives),
    Trial("SPMD mode, with one worker", _spmd_step),  # before any backward on the CPU
    Trial("tensor-parallel layers", _tensor_parallel),
)
"""What is tried, in this order."""
