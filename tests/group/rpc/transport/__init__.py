"""Tests of ``rpc.transport``."""
