"""Observing a running job: state files that each worker writes, and the commands that read them.

The worker's side: ``installation`` observes each process with an agent (``observer``). ``looks`` finds what
its threads do, ``locks`` finds the holders of locks, and ``state_file`` writes the result, in the layout of
``layout``, into the folder of the job (``jobs``). ``frozen_stacks`` makes a process write its stacks when its
interpreter cannot run.

The reader's side: ``reader`` reads all state files of a job, ``analysis`` finds out what waits for what and
why, and ``words`` describes it.
"""
