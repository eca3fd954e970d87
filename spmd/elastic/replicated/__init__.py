"""Replicated objects: hosted by several workers, so that no call to them is lost or doubled by a death.

``order`` decides, without I/O; ``machine`` runs the methods; ``host`` carries out what ``order`` decides;
``handle`` is what programs use.
"""
