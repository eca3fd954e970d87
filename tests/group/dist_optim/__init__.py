"""Tests of distributed optimizers."""
