"""Tests of ``rpc``."""
