"""Tests of the package ``rref``."""
