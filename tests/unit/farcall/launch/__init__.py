"""Tests of ``farcall.launch``."""
