"""Collectives between ranks that share no memory: ``network``, by ``schedules``; ``hierarchy`` combines it
with ``spmd.collectives.one_host``.
"""
