"""Tests of ``spmd.collectives.one_host``."""
