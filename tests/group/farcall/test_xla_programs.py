"""Whole programs for PyTorch/XLA's SPMD mode, run as they are by ``farcall run``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

_TIME_LIMIT = 300.0
"""Each program starts five processes that import PyTorch, which takes minutes on a loaded machine."""

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(_TIME_LIMIT + 20)]


ONE_PROCESS = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import torch_xla
from torch_xla import runtime as xr
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel


def train(model):
    x = torch.ones(4, 3, device=torch_xla.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.step()
    return [each.cpu() for each in model.parameters()]


def main(index):
    dist.init_process_group("xla", init_method="xla://")
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("xla", 0, 1)
    assert not xr.is_spmd()
    plain, *models = (nn.Linear(3, 2).to(torch_xla.device()) for _ in range(3))
    for each in models:
        each.load_state_dict(plain.state_dict())
    sharded = XlaFullyShardedDataParallel(models[1], compute_dtype=torch.float32, reshard_after_forward=False)
    assert sharded.in_features == 3 and sharded.module is models[1]
    expected = train(plain)
    for model in (DistributedDataParallel(models[0], gradient_as_bucket_view=True), sharded):
        assert all(map(torch.equal, train(model), expected))
    with pytest.raises(ValueError, match="torch.autocast"):
        XlaFullyShardedDataParallel(plain, compute_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="'sharding_groups'"):
        XlaFullyShardedDataParallel(plain, sharding_groups=[[0, 1]])
    dist.destroy_process_group()


torch_xla.launch(main)
"""

LANGUAGE = """
import functools
import sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend
from torch_xla import runtime as xr
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.distributed_checkpoint import CheckpointManager, prime_optimizer
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def make():
    return nn.Sequential(nn.Embedding(40, 32), Layer(32), Layer(32), nn.Linear(32, 40, bias=False))


def cut(model, mesh):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    return FSDPv2(model, mesh, auto_wrap_policy=policy)


def step(model, optimizer, words):
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


xr.use_spmd()
dist.init_process_group("gloo", init_method="xla://")
torch.manual_seed(0)
n = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(n), (n, 1), ("fsdp", "model"))
alone = make()
model = make()
model.load_state_dict(alone.state_dict())
for layer in model[1:3]:
    checkpoint_module(layer)
model = cut(model, mesh)
words = torch.randint(40, (8, 12))
there = words.to(torch_xla.device())
xs.mark_sharding(there, mesh, ("fsdp", None))
optimizer, its = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, alone))
manager = CheckpointManager(sys.argv[1], 2, max_to_keep=1, process_group=dist.group.WORLD)
for number in range(5):
    with torch_xla.step():
        loss = step(model, optimizer, there)
    assert abs(loss.item() - step(alone, its, words).item()) < 1e-5
    manager.save_async(number, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
manager.join()
assert manager.all_steps() == [4]

again = cut(make(), mesh)
new = prime_optimizer(torch.optim.AdamW(again.parameters(), lr=1e-2))
state = {"model": again.state_dict(), "optimizer": new.state_dict()}
manager.restore(4, state)
again.load_state_dict(state["model"])
new.load_state_dict(state["optimizer"])
one, other = step(model, optimizer, there).item(), step(again, new, there).item()
assert abs(one - other) < 1e-6, (one, other)
"""


TRAINER = """
import sys
import numpy as np
import torch
import torch_xla.distributed.spmd as xs
from torch_xla import runtime as xr
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class SetsOptimizer(Trainer):
    def _wrap_model(self, model, *args, **options):  # transformers makes none for FSDPv2
        wrapped = super()._wrap_model(model, *args, **options)
        if wrapped is not self.model and self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped


def losses(**options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    ))
    words = torch.randint(96, (16, 12))
    arguments = TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=8, max_steps=2, logging_steps=1,
        learning_rate=1e-2, save_strategy="no", report_to=[], disable_tqdm=True, **options,
    )
    data = [{"input_ids": each, "labels": each} for each in words]
    trainer = SetsOptimizer(model, arguments, train_dataset=data)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


xr.use_spmd()
whole = losses()
n = xr.global_runtime_device_count()
xs.set_global_mesh(xs.Mesh(np.arange(n), (n, 1), ("fsdp", "model")))
cut = losses(fsdp=True, fsdp_config={"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True})
assert len(whole) == 2 and np.allclose(whole, cut, atol=1e-4), (whole, cut)
"""


PLAIN = """
from accelerate import Accelerator
from accelerate.utils import is_torch_xla_available
from transformers import TrainingArguments
import sys

assert not is_torch_xla_available()
assert str(Accelerator().device) == "cpu"
assert str(TrainingArguments(sys.argv[1]).device) == "cpu"
"""

ACCELERATE = """
import torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import DistributedType


def losses(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward, clip = torch.autograd.backward, nn.utils.clip_grad_norm_
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward, clip = accelerator.backward, accelerator.clip_grad_norm_
    found = []
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        backward(loss)
        clip(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach() if accelerator is None else accelerator.gather(loss.detach()).cpu())
    return torch.stack([each.reshape(()) for each in found])


def main():
    import torch_xla.runtime as xr
    xr.use_spmd()
    accelerator = Accelerator()
    assert accelerator.distributed_type is DistributedType.XLA
    assert accelerator.device.type == "spmd"
    assert torch.allclose(losses(accelerator), losses(None), atol=1e-5)


main()
"""


def run(tmp_path: Path, program: str, *options: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    (tmp_path / "checkpoints").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "run", *options, str(script), str(tmp_path / "checkpoints")],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIME_LIMIT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "FARCALL_SPMD_WORKERS": "4",
        },
    )
    assert done.returncode == 0, done.stderr


def test_a_program_for_several_processes_runs_as_one(tmp_path: Path) -> None:
    run(tmp_path, ONE_PROCESS)


def test_a_language_model_is_trained_saved_and_restored_with_fsdp(tmp_path: Path) -> None:
    run(tmp_path, LANGUAGE)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_hugging_faces_trainer_trains_with_fsdp(tmp_path: Path) -> None:
    run(tmp_path, TRAINER)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_program_of_accelerate_that_does_not_ask_for_xla_stays_on_the_cpu(tmp_path: Path) -> None:
    run(tmp_path, PLAIN)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_program_of_accelerate_trains_on_the_device_by_an_option(tmp_path: Path) -> None:
    run(tmp_path, ACCELERATE, "--xla")
