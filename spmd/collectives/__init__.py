"""Collectives: the c10d backend ``farcall``, on the agent that also makes calls.

From the top:

- ``creation``: makes a ``process_group``, c10d's interface of a ``group``, from c10d's description of a new
  group.
- ``group`` composes: ``membership``, the ranks that are present, and whether the group has failed;
  ``sequencer`` and ``work``: order, threads, waiting; ``node``: the agent; ``formation``: how ranks find each
  other, and the memory that they share.
- ``local``, over a ``board`` in shared memory (``futex``), within a host; ``network`` and its ``schedules``
  between hosts; ``hierarchy``: both; ``reductions``; ``messages``: sends and receives.
- ``signature``: how ranks notice that they have called different operations.
"""
