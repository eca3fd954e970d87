"""Observing a running job: state files that each worker writes, and the commands that read them.

A worker writes (``worker``), other processes read (``reading``), and a format is between them (``format``).
``why`` finds out what waits for what in the state of a job, ``trace`` makes one file of the traces of all
workers, and ``metrics`` serves their counts. ``installation`` observes each process with an agent, and
``commands`` has the commands of ``farcall``.
"""
