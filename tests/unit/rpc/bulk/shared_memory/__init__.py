"""Tests of shared memory, mirroring the modules of ``rpc.bulk.shared_memory``."""
