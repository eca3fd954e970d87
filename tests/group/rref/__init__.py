"""Tests of ``rref``."""
