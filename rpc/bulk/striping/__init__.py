"""Large messages over several TCP connections at once, where the network limits what one gets: by option.

Many networks limit what one connection gets. With the option ``tcp_stripes``, two workers open *stripes*
beside the connection between them, when the first large message has been sent. From then on large messages
travel in chunks over all of them, each chunk over whichever takes it, and the connection itself is left to
what is small.

``cutting.py`` has the theory, and is pure: which chunk goes next, and what may arrive. ``sending.py`` and
``receiving.py`` are the two directions of a set of stripes, ``opening.py`` says how a stripe is told from a
stranger, ``exchange.py`` what is said about stripes on the connection itself.
"""

from __future__ import annotations

from rpc.bulk.striping.exchange import Striping

__all__ = ["Striping"]
