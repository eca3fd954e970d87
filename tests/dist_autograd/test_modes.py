"""PyTorch's modes that a program may be in: when it imports the packages, and all the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch

with {mode}:
    import dist_autograd
    import rpc

{default}
options = rpc.options.AgentOptions(init_method="file://{folder}/rendezvous")
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
x = torch.ones(2, device="cpu", requires_grad=True)
x.register_hook(lambda gradient: gradient * 2)
with dist_autograd.context() as context_id:
    one, other = (rpc.rpc_sync("alone", torch.mul, args=(x, factor)) for factor in (3, 4))
    y = rpc.rpc_sync("alone", torch.mul, args=(one * other, 1))
    dist_autograd.backward(context_id, [y.sum()])
    print(dist_autograd.get_gradients(context_id)[x].tolist())
rpc.shutdown()
"""


def output(folder: Path, mode: str, default: str = "") -> str:
    program = PROGRAM.format(mode=mode, default=default, folder=folder)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mode", ["torch.no_grad()", "torch.inference_mode()", "torch.device('meta')"])
def test_gradients_are_right_wherever_the_import_stood(tmp_path: Path, mode: str) -> None:
    assert output(tmp_path, mode) == "[48.0, 48.0]\n"


def test_gradients_are_right_where_new_tensors_are_on_another_device(tmp_path: Path) -> None:
    default = "torch.set_default_device('meta')"
    assert output(tmp_path, "torch.device('meta')", default) == "[48.0, 48.0]\n"
