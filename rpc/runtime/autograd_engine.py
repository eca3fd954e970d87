"""PyTorch's autograd engine in a forked process.

A forked process inherits an engine without its threads. PyTorch destroys that engine and constructs another
one when the child first uses it (``PythonEngine::get_python_engine``), which is when an operation first saves
a tensor for backward. No lock guards this, and the GIL is not held. If two threads get there at the same
time, both destroy the engine, and the process ends with SIGSEGV. The first calls to a forked worker may well
arrive together.

A process that has not forked since it imported PyTorch constructs its engine once, as a C++ static, which is
safe.
"""

from __future__ import annotations

import torch

__all__ = ["renew_autograd_engine"]


def renew_autograd_engine() -> None:
    """Replace an inherited engine, before several threads may use it. Takes less than a millisecond."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).exp()  # saves its result for backward
