"""Tests of ``spmd.tensor_parallel``."""
