"""PyTorch's modes: an import of the packages may stand in any, and new tensors be on any device."""

from __future__ import annotations

from pathlib import Path

from tests.support.fresh import RunFresh

PROGRAM = """
import sys

import torch

with torch.inference_mode(), torch.device("meta"):
    import dist_autograd
    import rpc

for device in ("cpu", "meta"):
    torch.set_default_device(device)
    options = rpc.options.AgentOptions(init_method=f"file://{sys.argv[1]}/{device}")
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


def test_gradients_are_right_wherever_the_import_stood(tmp_path: Path, run_fresh: RunFresh) -> None:
    done = run_fresh(PROGRAM, str(tmp_path))
    assert (done.stdout, done.returncode) == ("[48.0, 48.0]\n" * 2, 0), done.stderr
