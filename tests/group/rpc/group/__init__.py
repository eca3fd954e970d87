"""Tests of ``rpc.group``."""
