"""Tests of ``spmd.workers``."""
