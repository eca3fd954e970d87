"""Distributed autograd: gradients through calls to other workers.

Example::

    with dist_autograd.context() as context_id:
        loss = loss_fn(model(x), y)            # parts of the model live on other workers
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
"""

from __future__ import annotations

import farcall_guard

farcall_guard.check("rpc", "rref")

from dist_autograd.api import (
    autograd,
    backward,
    change_gradients,
    context,
    current_context,
    get_gradients,
    has_context,
)
from dist_autograd.installation import install

__all__ = [
    "backward",
    "change_gradients",
    "context",
    "current_context",
    "debug_info",
    "get_gradients",
    "has_context",
    "install",
]


def debug_info() -> dict[str, int]:
    """Return ``num_autograd_contexts``, the number of contexts that this worker knows, and
    ``num_current_backward_passes``, the number of backward passes that it takes part in now.
    """
    return autograd().debug_info()
