"""Tests of distributed autograd."""
