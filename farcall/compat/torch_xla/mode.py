"""When the device begins: with ``use_spmd``, or, as one of one worker, when a program asks for it before."""

from __future__ import annotations

import os

from farcall.compat.torch_xla import compiling, device_name, operators, specs
from rpc.runtime.current import is_initialized
from spmd.engine.driver import start
from spmd.sharding.mode import use_spmd

__all__ = ["begin_alone", "begin_spmd", "expected_workers", "is_spmd", "lend_names"]

_FLAG = "XLA_USE_SPMD"
_is_alone = False
"""Whether the device that there is was asked for without ``use_spmd``."""


def is_spmd() -> bool:
    """Whether the program has called ``use_spmd``, and ``XLA_USE_SPMD`` still says so, as theirs."""
    return start.is_spmd() and not _is_alone and os.environ.get(_FLAG) == "1"


def begin_spmd() -> None:
    """Begin SPMD mode. A second call changes nothing; a device of one worker ends, with its tensors."""
    global _is_alone
    if _is_alone:
        start.shutdown()
        _is_alone = False
    if not start.is_spmd():
        use_spmd(_said_workers())
    os.environ[_FLAG] = "1"
    lend_names()


def begin_alone() -> None:
    """Make sure that there is a device: that of SPMD mode, or one of one worker."""
    global _is_alone
    if not start.is_spmd():
        use_spmd(1)
        _is_alone = True
        lend_names()


def expected_workers() -> int:
    """The number of workers that there are, or that ``use_spmd`` would begin with."""
    if is_spmd():
        return start.global_device_count()
    said = os.environ.get("FARCALL_SPMD_WORKERS") or os.environ.get("CPU_NUM_DEVICES")
    return int(said) if said else len(os.sched_getaffinity(0))


def _said_workers() -> int | None:
    """What XLA's variable says, unless ours says something, or workers are there already."""
    said = os.environ.get("CPU_NUM_DEVICES", "")
    is_here = "FARCALL_SPMD_WORKERS" not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    return int(said) if said.isdecimal() and is_here and not is_initialized() else None


def lend_names() -> None:
    """Register ``"xla"``, XLA's operators and its backends of ``torch.compile`` with PyTorch. Idempotent."""
    device_name.lend(begin_alone)
    operators.define()
    compiling.lend()
    specs.lend()
