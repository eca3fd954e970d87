"""Tests of ``spmd.engine``."""
