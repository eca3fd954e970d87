"""Tests of real workers, each in a process of its own."""
