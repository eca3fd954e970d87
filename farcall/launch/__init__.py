"""``farcall launch``: processes of a program on this machine, and what they have to do with other machines.

From the command line down::

    launcher        one launcher: output, signals, exit status
    static_group    all processes are one unit: they run, stop and start again together, on all machines
    dynamic_group   each process runs, and starts again, alone
    link            what launchers tell each other, through a store
    liveness        whether they live
    rounds          what follows from that: run, stop, end (pure functions)
    processes       the processes of one machine: starting, signals, grace, end
    output          their output, line by line
    guard           ends them if their launcher was killed

In each process, ``worker_main`` runs the program (``program``).
"""
