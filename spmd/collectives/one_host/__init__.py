"""Collectives of ranks that share memory: ``local``, over a ``board``."""
