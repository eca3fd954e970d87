"""Makes ``torch.distributed.rpc`` mean farcall, so that programs written for it run unmodified.

Example::

    import farcall.compat

    farcall.compat.install()            # before the program imports torch.distributed.rpc

    import torch.distributed.rpc as rpc

``farcall run SCRIPT ARGS...`` does it for a program that cannot be changed at all.
"""

from __future__ import annotations

from farcall.compat.installation import CompatError, install, is_installed, uninstall

__all__ = ["CompatError", "install", "is_installed", "uninstall"]
