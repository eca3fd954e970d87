"""Tests of ``farcall.serving``."""
