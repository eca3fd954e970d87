"""Tests of the examples and the guide."""
