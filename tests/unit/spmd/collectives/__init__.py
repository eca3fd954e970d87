"""Tests of ``spmd.collectives``."""
