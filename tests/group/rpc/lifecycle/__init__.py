"""Tests of ``rpc.lifecycle``."""
