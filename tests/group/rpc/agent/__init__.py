"""Tests of ``rpc.agent``."""
