"""Tests of ``rpc.testing``."""
