"""``torch_xla.test.test_utils``: what their training scripts print and note."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

__all__ = [
    "close_summary_writer",
    "get_summary_writer",
    "now",
    "print_test_update",
    "print_training_update",
    "write_to_summary",
]


def now(format: str = "%H:%M:%S") -> str:  # noqa: A002  theirs
    """The time of day."""
    return time.strftime(format)


def get_summary_writer(logdir: str | None) -> Any:
    """A writer for TensorBoard; None without a folder."""
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=logdir)


def close_summary_writer(summary_writer: Any) -> None:
    """Flush and close it, if there is one."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, Any] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers, if there is a writer; of XLA's metrics there are none."""
    if summary_writer is not None:
        for name, value in (dict_to_write or {}).items():
            summary_writer.add_scalar(name, value, global_step)


def print_training_update(
    device: torch.device,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print a line of a training loop."""
    _print(
        "Training",
        Device=device,
        Epoch=epoch,
        Step=step,
        Loss=f"{float(loss):.5f}",
        Rate=f"{rate:.2f}",
        GlobalRate=f"{global_rate:.2f}",
    )
    write_to_summary(summary_writer, None, {"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(
    device: torch.device, accuracy: float | None, epoch: int | None = None, step: int | None = None
) -> None:
    """Print a line of an evaluation."""
    shown = None if accuracy is None else f"{float(accuracy):.2f}"
    _print("Test", Device=device, Step=step, Epoch=epoch, Accuracy=shown)


def _print(kind: str, **values: object) -> None:
    said = [f"{name}={value}" for name, value in values.items() if value is not None]
    print("|", kind, *said, f"Time={now()}", flush=True)
