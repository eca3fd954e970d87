"""Tests of ``rpc.bulk``."""
