"""The runtime and the device under XLA's names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


@driven
def test_there_is_one_process_with_one_device() -> None:
    x = theirs()
    ones = "world_size global_device_count local_device_count addressable_device_count process_count"
    assert [getattr(x.xr, name)() for name in (*ones.split(), "local_process_count")] == [1] * 6
    assert [getattr(x.xr, name)() for name in ("global_ordinal", "local_ordinal", "process_index")] == [0] * 3
    assert x.xr.is_spmd()
    assert x.xr.global_runtime_device_count() == x.xr.addressable_runtime_device_count() == WORKERS
    assert len(x.xr.global_runtime_device_attributes()) == WORKERS
    assert (x.xm.xrt_world_size(), x.xm.get_ordinal(), x.xm.get_local_ordinal()) == (1, 0, 0)
    assert x.xm.is_master_ordinal()
    assert len(x.xm.get_xla_supported_devices("CPU")) == 1


@driven
def test_the_device_is_of_the_kind_of_the_runtime() -> None:
    x = theirs()
    device = x.xm.xla_device()
    assert device == x.torch_xla.device() == x.torch_xla.devices()[0]
    kind = x.xr.device_type()
    assert x.xm.xla_real_devices([device]) == [f"{kind}:0"]
    assert x.xm.xla_device_hw(device) == kind
    assert x.xm.xla_replication_devices([device]) == []


@driven
def test_the_word_xla_names_the_device() -> None:
    x = theirs()
    device, data = x.xm.xla_device(), torch.randn(2, 3, requires_grad=True)
    linear = torch.nn.Linear(3, 2).to("xla")
    made: list[Any] = [
        data.to("xla"),
        data.to(torch.device("xla:0"), torch.float64),
        torch.zeros(2, device="xla"),
        torch.tensor([1.0], device=torch.device("xla")),
        torch.zeros_like(data, device="xla"),
        torch.nn.Linear(3, 2, device="xla").weight,
        linear.weight,
        linear(data.to(device="xla")),
    ]
    assert {each.device for each in made} == {device}
    assert made[0].to("xla") is made[0]
    torch.autograd.backward(made[0].sum())
    assert data.grad is not None
    assert data.grad.equal(torch.ones(2, 3))
    with torch.device("xla"):
        assert torch.ones(1).device == device


@driven
def test_groups_of_the_backend_xla_are_refused() -> None:
    theirs()
    importlib.import_module("torch_xla.distributed.xla_backend")
    with pytest.raises((AssertionError, RuntimeError), match="mixed with other distributed libraries"):
        dist.init_process_group("xla", init_method="xla://")
    if dist.is_initialized():
        dist.destroy_process_group()


@driven
def test_lower_precision_is_asked_for_by_device() -> None:
    theirs()
    amp: Any = importlib.import_module("torch_xla.amp")
    a, b = torch.ones(2, 3, device="xla"), torch.ones(3, 2, device="xla")
    for device in (a.device, "xla"):
        with amp.autocast(device, dtype=torch.bfloat16):
            assert torch.matmul(a, b).dtype == torch.bfloat16
    assert torch.matmul(a, b).dtype == torch.float32


@driven
def test_random_numbers_are_those_of_one_device() -> None:
    x = theirs()
    x.xm.set_rng_state(7)
    assert x.xm.get_rng_state() == 7
    drawn = torch.randn(6, 4, device="xla")
    marked = x.xs.mark_sharding(torch.randn(6, 4, device="xla"), mesh_of(WORKERS), (0, None))
    torch.manual_seed(7)
    assert drawn.cpu().equal(torch.randn(6, 4))
    assert marked.cpu().equal(torch.randn(6, 4))
    assert said(marked) == f"{{devices=[4,1]{IN_ORDER}}}"


@driven
def test_names_of_tools_around_training_do_what_one_process_needs() -> None:
    x = theirs()
    profiler: Any = importlib.import_module("torch_xla.debug.profiler")
    metrics: Any = importlib.import_module("torch_xla.debug.metrics")
    with profiler.StepTrace("step", step_num=1), profiler.Trace("forward"):
        t = torch.ones(4, device="xla") * 2
    x.torch_xla.sync()
    assert metrics.counter_value("CompileTime") is None
    assert metrics.metric_data("ExecuteTime") is None
    assert isinstance(metrics.metrics_report(), str)
    assert x.xm.rendezvous("here", b"one") == [b"one"]
    assert x.xm.mesh_reduce("loss", t.sum().item(), max) == 8.0


@driven
def test_names_that_libraries_ask_for_are_those_of_one_replica() -> None:
    x = theirs()
    fsdp: Any = importlib.import_module("torch_xla.distributed.fsdp")
    assert x.torch_xla.__version__ >= "2.2"
    t = torch.full((4,), 3.0, device="xla", requires_grad=True)
    optimizer = torch.optim.SGD([t])
    assert x.xm._fetch_gradients(optimizer) == []
    torch.autograd.backward(t.sum())
    x.xm.all_reduce(x.xm.REDUCE_SUM, x.xm._fetch_gradients(optimizer), scale=0.5)
    assert t.grad is not None
    assert t.grad.tolist() == [0.5] * 4
    assert x.xm.all_reduce(x.xm.REDUCE_MAX, t).tolist() == [3.0] * 4
    counts = torch.arange(3, device="xla")
    assert x.xm.all_reduce(x.xm.REDUCE_SUM, counts).dtype == torch.int64
    assert x.xm.all_gather(t) is t
    x.xm.collective_broadcast([t])
    x.xm.set_replication(t.device, x.xm.get_xla_supported_devices())
    assert x.xm._maybe_convert_to_cpu({"t": [t]})["t"][0].device.type == "cpu"
    with pytest.raises(RuntimeError, match="in SPMD mode there is one process"):
        fsdp.XlaFullyShardedDataParallel(torch.nn.Linear(2, 2))


@driven
def test_autocast_of_xla_is_in_force_on_the_device() -> None:
    x = theirs()
    t = torch.randn(4, 4, device="xla")
    lower: Any = torch.bfloat16
    for mode in (
        lambda: torch.autocast("xla", dtype=lower),
        lambda: torch.autocast("xla"),
        lambda: torch.amp.autocast("xla"),
        lambda: x.torch_xla.amp.autocast(x.torch_xla.device()),
        lambda: torch.autocast("spmd", dtype=lower),
    ):
        with mode():
            assert (t @ t).dtype is lower
            assert torch.is_autocast_enabled("xla")
            assert torch.get_autocast_dtype("xla") is lower
            with torch.autocast("xla", enabled=False):
                assert (t @ t).dtype is torch.float32
            assert (t @ t).dtype is lower
        assert (t @ t).dtype is torch.float32
        assert not torch.is_autocast_enabled("xla")
    with torch.autocast("xla", dtype=torch.float16):
        assert (t @ t).dtype is torch.float16


@driven
def test_classes_of_any_dtype_give_the_loss_of_integers() -> None:
    theirs()
    scores, classes = torch.randn(3, 5), torch.tensor([1, 2, 0])
    image, labels = torch.randn(2, 3, 2, 2), torch.tensor([[[0, 1], [2, 0]]] * 2)
    for there, target in ((scores, classes), (image, labels)):
        known = there.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(known, target)
        torch.autograd.backward(loss)
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int16, torch.uint8, torch.int64):
            t = there.to("xla").requires_grad_()
            found = torch.nn.functional.cross_entropy(t, target.to("xla", dtype))
            torch.autograd.backward(found)
            assert t.grad is not None
            torch.testing.assert_close(found.cpu(), loss)
            torch.testing.assert_close(t.grad.cpu(), known.grad)


@driven
def test_a_file_is_restored_where_map_location_says_xla(tmp_path: Path) -> None:
    x = theirs()
    path = tmp_path / "state"
    torch.save({"here": torch.ones(2), "there": torch.ones(2, device="xla")}, path)
    for place in ("xla", "xla:0", x.torch_xla.device(), torch.device("xla")):
        found = torch.load(path, map_location=place)
        assert {t.device for t in found.values()} == {x.torch_xla.device()}
