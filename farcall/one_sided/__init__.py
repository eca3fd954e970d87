"""One-sided transfers of CPU memory, as a plug-in of ``torch.distributed._transport`` in PyTorch 2.15.

::

    from torch.distributed._transport import new_transport

    transport = new_transport("farcall", "cpu")

PyTorch finds it by the entry point ``torch.distributed.transports``. The bytes go through shared memory
between processes of one host, over TCP between hosts.
"""

from __future__ import annotations
