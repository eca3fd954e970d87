"""Tests of programs that are built on farcall: a transport without sockets, with which a test decides the
order of events, and faults in what a worker sends.
"""
