"""Tests of rpc.serialization."""
