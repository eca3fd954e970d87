"""Tests of ``rpc.profiling``."""
