"""Tests of ``rpc.serialization``."""
