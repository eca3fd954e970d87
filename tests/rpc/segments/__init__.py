"""Tests of shared memory, mirroring the modules of ``rpc.segments``."""
