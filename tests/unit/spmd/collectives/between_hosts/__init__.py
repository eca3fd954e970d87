"""Tests of ``spmd.collectives.between_hosts``."""
