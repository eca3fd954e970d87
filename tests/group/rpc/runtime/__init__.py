"""Tests of ``rpc.runtime``."""
