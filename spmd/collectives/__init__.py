"""Collectives: the c10d backend ``farcall``, on the agent that also makes calls.

From the top:

- ``creation``: from what c10d knows of a new group to its ``process_group``, c10d's face of a ``group``.
- ``group`` composes; ``membership``: who is there, and whether the group has failed; ``sequencer`` and
  ``work``: order, threads, waiting; ``node``: the agent; ``formation``: how ranks find each other, and the
  memory that they share.
- ``local``, over a ``board`` in shared memory (``futex``), on one host; ``network`` and its ``schedules``
  between hosts; ``hierarchy``: both; ``reductions``; ``messages``: sends and receives.
- ``signature``: how ranks find out that they have not called the same.
"""
