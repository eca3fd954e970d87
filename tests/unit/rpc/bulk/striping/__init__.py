"""Tests of messages over several connections, mirroring the modules of ``rpc.bulk.striping``."""
