"""Whole groups of workers in one process and one thread, on simulated time: the agents are real, threads,
sockets and clocks are not. See ``__main__`` for how to run it, ``life`` for what is checked.
"""
