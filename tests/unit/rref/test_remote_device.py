"""Where a remote module is to live, as one writes it."""

from __future__ import annotations

import pytest
import torch

from rref.remote_module.remote_device import RemoteDevice


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("worker1/cpu", "worker1", "cpu"),
        ("worker1", "worker1", "cpu"),
        ("worker1/cuda:2", "worker1", "cuda:2"),
        ("rank:1/cpu", 1, "cpu"),
        ("rank:1", 1, "cpu"),
        ("rank:first/cpu", "rank:first", "cpu"),
        ("cpu/cpu", "cpu", "cpu"),
    ],
)
def test_a_worker_and_a_device_there(text: str, worker: str | int, device: str) -> None:
    assert RemoteDevice.parse(text) == RemoteDevice(worker, torch.device(device))


@pytest.mark.parametrize("text", ["", "/", "/cuda:0", "worker1/cuda:0/cuda:1"])
def test_other_forms_are_refused_with_the_right_one(text: str) -> None:
    with pytest.raises(ValueError, match=f"Could not parse remote_device: {text}. The valid format is"):
        RemoteDevice.parse(text)


@pytest.mark.parametrize("text", ["cpu", "cuda:1"])
def test_a_device_alone_names_no_worker(text: str) -> None:
    with pytest.raises(ValueError, match=f"names a device but no worker: write '<workername>/{text}'"):
        RemoteDevice.parse(text)


@pytest.mark.parametrize("text", ["worker1/foo", "worker1/cpu2", "worker1/", "cpu/worker1"])
def test_an_unknown_kind_of_device_is_refused(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"[Dd]evice.* It is '<workername>/<device>'"):
        RemoteDevice.parse(text)


def test_what_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="remote_device is a string such as 'worker1/cpu', not a device"):
        RemoteDevice.parse(torch.device("cpu"))  # type: ignore[arg-type]
