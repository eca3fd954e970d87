"""Tests of ``spmd.sharding``."""
