"""``farcall launch``: processes of a program on this machine, and their coordination with other machines.

From the command line down::

    launcher        one launcher: output, signals, exit status
    static_group    all processes are one unit: they run, stop and restart together, on all machines
    dynamic_group   each process runs, and restarts, alone
    link            messages between launchers, through a store
    liveness        whether other launchers live
    rounds          the orders that follow: run, stop, end (pure functions)
    processes       the processes of one machine: start, signals, grace period, end
    output          their output, line by line
    lines           which text of several streams is shown when
    guard           ends them if their launcher was killed

In each process, ``worker_main`` runs the program (``program``).
"""
