"""Tests of ``spmd.checkpoint``."""
