"""Names that programs for XLA import beside those of SPMD mode: each works, or says what to use."""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


def module(name: str) -> Any:
    theirs()
    return importlib.import_module(f"torch_xla.{name}")


@driven
def test_a_scan_is_the_loop() -> None:
    scan = module("experimental.scan").scan
    xs = torch.arange(6.0).view(3, 2)
    there = xs.to("xla").requires_grad_()
    zero = torch.zeros(2, device="xla")
    carry, ys = scan(lambda total, x: (total + x["a"], {"b": total * 2}), zero, {"a": there})
    assert carry.tolist() == xs.sum(0).tolist()
    assert ys["b"].tolist() == [[0, 0], [0, 2], [4, 8]]
    torch.autograd.backward(carry.sum())
    assert there.grad is not None
    assert there.grad.tolist() == [[1, 1]] * 3
    history = scan(lambda total, x: (total.add_(x), total), zero, xs.to("xla"))[1]
    assert history.tolist() == xs.cumsum(0).tolist()
    assert zero.tolist() == [0, 0]
    with pytest.raises(ValueError, match="expected xs of tensors with one first dimension, got lengths"):
        scan(lambda total, x: (total, x), 0, (torch.ones(2), torch.ones(3)))


@driven
def test_layers_are_scanned_as_a_sequence() -> None:
    scan_layers = module("experimental.scan_layers").scan_layers
    layers = [nn.Linear(4, 4).to("xla") for _ in range(3)]
    x = torch.ones(2, 4, device="xla")
    assert torch.equal(scan_layers(layers, x).cpu(), nn.Sequential(*layers)(x).cpu())
    with pytest.raises(ValueError, match="layer 1 has other parameters than layer 0"):
        scan_layers([nn.Linear(4, 4), nn.Linear(4, 2)], x)


@driven
def test_gradients_accumulate_over_slices() -> None:
    accumulate = module("experimental.gradient_accumulation").gradient_accumulation
    model = nn.Linear(4, 1).to("xla")
    batches = torch.randn(3, 2, 4).to("xla")
    total, count = accumulate(
        lambda x, count: (model(x).sum(), count + 1), (batches,), model, torch.zeros((), device="xla")
    )
    found = model.weight.grad
    assert found is not None
    assert torch.allclose(found.cpu(), batches.sum(1).mean(0).cpu(), atol=1e-5)
    assert torch.allclose(total.cpu(), model(batches).sum((1, 2)).mean().cpu(), atol=1e-4)
    assert count.item() == 3
    with pytest.raises(ValueError, match="iterable_tensors cannot be empty"):
        accumulate(lambda: None, (), model)


@driven
def test_what_only_xla_has_says_what_to_use() -> None:
    x = theirs()
    for name, attribute, use in (
        ("_XLAC", "_get_xla_tensors_hlo", "no compiler"),
        ("core.xla_model", "collective_permute", "mark_sharding"),
        ("experimental.custom_kernel", "flash_attention", "scaled_dot_product_attention"),
        ("experimental.custom_kernel", "FlashAttention", "scaled_dot_product_attention"),
        ("debug.profiler", "trace", "torch.profiler"),
    ):
        with pytest.raises(NotImplementedError, match=use):
            getattr(module(name), attribute)("localhost:9012", "logs")
    with pytest.raises(RuntimeError, match="SpmdFullyShardedDataParallel"):
        module("distributed.fsdp").XlaFullyShardedDataParallel(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"torch_xla\.runtime without 'no_such_name'"):
        _ = x.xr.no_such_name


@driven
def test_replicas_functions_are_those_of_one_replica() -> None:
    x = theirs()
    t = torch.arange(4.0, device="xla")
    assert x.xm.reduce_scatter("sum", t, 0.5, 0, 1).tolist() == [0, 0.5, 1, 1.5]
    assert x.xm.is_xla_tensor(t)
    assert not x.xm.is_xla_tensor(torch.ones(1))
    assert 0 < x.xm.get_memory_info()["bytes_used"] <= x.xm.get_memory_info()["bytes_limit"]
    model = nn.Linear(2, 2).to("xla")
    x.xm.broadcast_master_param(model)
    x.xm.reduce_gradients(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="shard_count is 4"):
        x.xm.reduce_scatter("sum", t, 1.0, 0, 4)


@driven
def test_a_compiled_step_counts_its_rate_and_calls_back_when_it_is_done() -> None:
    x = theirs()
    tracker, told = x.xm.RateTracker(), []
    compiled = x.torch_xla.compile(lambda t: t.square().sum(), full_graph=True, name="step")
    for batch in x.pl.MpDeviceLoader(x.xu.SampleGenerator(torch.full((8, 2), 2.0), 3), x.xm.xla_device()):
        tracker.add(len(batch))
        x.xm.add_step_closure(lambda loss: told.append(float(loss)), args=(compiled(batch),))
    x.xm.wait_device_ops()
    assert told == [64.0] * 3
    assert tracker.global_rate() > 0


@driven
def test_tensors_are_cut_as_others_and_meshes_follow_the_machine() -> None:
    x = theirs()
    t, other = torch.randn(8, 4).to("xla"), torch.randn(8, 4).to("xla")
    x.xs.mark_sharding(t, mesh_of(2, 2), (0, 1))
    assert x.xs.shard_as(other, t)[0] is other
    assert other.sharding_spec == t.sharding_spec == f"{{devices=[2,2]{IN_ORDER}}}"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="same shapes"):
        x.xs.shard_as([t], [t.T])
    linear = nn.Linear(4, 3)
    assert x.xs.apply_xla_patch_to_nn_linear(linear) is linear
    attributes = [{"name": f"TPU:{number}", "coords": [3 - number, 0, 0]} for number in range(WORKERS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_xla.runtime.global_runtime_device_attributes", lambda: attributes)
        mesh = x.xs.HybridMesh(ici_mesh_shape=(WORKERS, 1))
    assert mesh.get_logical_mesh().tolist() == [[3], [2], [1], [0]]


@driven
def test_programs_and_transfers_are_counted_under_their_names() -> None:
    x = theirs()
    metrics = module("debug.metrics")
    data, result = torch.arange(4.0), None

    def step() -> torch.Tensor:
        (sent,) = x.xm.send_cpu_data_to_device([data], "xla")
        made: torch.Tensor = sent * 7.5 + 2
        x.torch_xla.sync()
        return made

    for _ in range(2):
        result = step()
    metrics.clear_all()
    assert metrics.counter_value("ExecuteReplicated") is None
    for _ in range(3):
        result = step()
    assert result is not None
    assert metrics.metric_data("CompileTime") is None  # the program is known
    assert metrics.counter_value("ExecuteReplicated") == 3
    assert metrics.metric_data("OutboundData")[:2] == (3, 3 * WORKERS * data.nbytes)
    assert result.tolist() == [2, 9.5, 17, 24.5]
    assert metrics.metric_data("TransferFromDeviceTime")[0] == 1
    _ = (result - 3.25).sum().item()
    assert metrics.metric_data("CompileTime")[0] == 1


@driven
def test_what_is_marked_is_with_the_workers() -> None:
    x = theirs()
    t = torch.ones(WORKERS, 2).to("xla")
    assert "Tensor on host: with size" in x.torch_xla._XLAC._get_xla_tensor_debug_info(t)
    x.xs.mark_sharding(t, mesh_of(WORKERS), (0, None))
    said = x.torch_xla._XLAC._get_xla_tensor_debug_info(t)
    assert "Tensor on host: None" in said
    assert f"ShardingSpec: {{devices=[{WORKERS},1]{IN_ORDER}}}" in said


@driven
def test_sigterm_is_a_sync_point() -> None:
    binding = theirs().torch_xla._XLAC
    binding._activate_preemption_sync_manager()
    try:
        assert not binding._sync_point_reached(1)
        before = signal.getsignal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert binding._sync_point_reached(2)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        binding._deactivate_preemption_sync_manager()
    assert signal.getsignal(signal.SIGTERM) is not before
