"""For tests of what is built on farcall: a transport without sockets, where the test decides what happens
next, and faults of what a worker sends.
"""
