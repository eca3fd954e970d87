"""Collectives between ranks that share no memory: ``network``, by ``schedules`` and ``operation_messages``;
``hierarchy`` combines it with ``spmd.collectives.one_host``.
"""
