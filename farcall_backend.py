"""The entry points that PyTorch calls to learn about the backend ``farcall``. Nothing here imports this
module.

PyTorch 2.14 loads the backend when a program first names it (entry point group
``torch.distributed.backends``). Older versions only have a group that is loaded by ``import torch``
(``torch.backends``). Both entry points are installed; ``register_at_import`` does nothing where the other one
serves.

The module is at the top level and its name is unlikely to be anybody else's: ``import torch`` must succeed in
programs that have an ``rpc.py`` of their own and do not use farcall.
"""

from __future__ import annotations

import warnings

import farcall_guard

__all__ = ["register_at_import", "register_backend"]


def register_backend() -> None:
    """Register the backend with ``torch.distributed``.

    Raises:
        HiddenPackageError: a module of the program's hides one of farcall's packages.
    """
    farcall_guard.check(*farcall_guard.PACKAGES)
    from spmd.backend import register

    register()


def register_at_import() -> None:
    """Register the backend while ``import torch`` runs, if this version of PyTorch cannot do it later.

    A hidden package is reported as a warning.
    """
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "_ensure_backend_registered"):
        return
    try:
        register_backend()
    except farcall_guard.HiddenPackageError as error:
        warnings.warn(f"PyTorch runs without the backend 'farcall'. {error}", stacklevel=2)
