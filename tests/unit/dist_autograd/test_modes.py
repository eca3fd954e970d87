"""PyTorch's modes: an import of the packages may stand in any, and new tensors be on any device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch

with torch.inference_mode(), torch.device("meta"):
    import dist_autograd
    import rpc

torch.set_default_device({device!r})
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gradients_are_right_wherever_the_import_stood(tmp_path: Path, device: str) -> None:
    program = PROGRAM.format(device=device, folder=tmp_path)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout, done.returncode) == ("[48.0, 48.0]\n", 0), done.stderr
