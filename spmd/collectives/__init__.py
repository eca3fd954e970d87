"""Collectives: the c10d backend ``farcall``, on the agent that also makes calls.

From the top:

- ``creation``: makes a ``process_group``, c10d's interface of a ``group``, from c10d's description of a new
  group.
- ``group`` composes: ``membership``, the ranks that are present, and whether the group has failed;
  ``sequencer`` and ``work``: order, threads, waiting; ``node``: the agent; ``formation``: how ranks find each
  other, and the memory that they share.
- ``messages``: sends and receives, and the ranks' messages about each other.
- Rooms by where collectives work: ``one_host`` has ``local``, over a ``board`` in shared memory;
  ``between_hosts`` has ``network`` with its ``schedules``, and ``hierarchy``, which combines both. Each has
  the interface of ``algorithms``, and uses ``reductions``.
- ``signature``: how ranks notice that they have called different operations.
"""
