"""Sees a job run: state files that each worker writes, and the commands that read them.

The worker's side: ``installation`` observes each process with an agent (``observer``); ``looks`` finds what
its threads do, ``locks`` finds the holders of locks, and ``state_file`` writes it, as ``layout`` says, into
the folder of the job (``jobs``). ``frozen_stacks`` has stacks written where the interpreter cannot run.

The reader's side: ``reader`` reads all state files of a job, ``analysis`` finds out what waits for what and
why, ``report`` says it.
"""
