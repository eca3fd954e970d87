"""Tests of the package ``rpc``."""
