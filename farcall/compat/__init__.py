"""Makes ``torch.distributed.rpc`` mean farcall, so that programs written for it run unmodified.

Example::

    import farcall.compat

    farcall.compat.install()            # before the program imports torch.distributed.rpc

    import torch.distributed.rpc as rpc

``farcall run SCRIPT ARGS...`` does it for a program that cannot be changed at all.
"""

from __future__ import annotations

import logging as _logging

import farcall_guard as _guard

if _hidden := _guard.prefer():
    _logging.getLogger(__name__).warning(_guard.explain(_hidden))

from farcall.compat.installation import CompatError, install, is_installed, uninstall

__all__ = ["CompatError", "install", "is_installed", "uninstall"]
