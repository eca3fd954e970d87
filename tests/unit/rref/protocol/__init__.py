"""Tests of ``rref.protocol``."""
