"""``torch_xla._internal.tpu``: the TPUs of this machine, of which there are none."""

from __future__ import annotations

__all__ = ["get_worker_ips", "num_available_chips", "num_available_devices", "num_tpu_workers", "version"]


def num_available_chips() -> int:
    """None."""
    return 0


num_available_devices = num_tpu_workers = num_available_chips


def version() -> int:
    """Raises: there is no TPU."""
    raise RuntimeError(
        "workers compute on CPUs: torch_xla.runtime.device_type() is 'CPU', and there is no TPU"
    )


def get_worker_ips() -> list[str]:
    """Of machines with TPUs: none."""
    return []
