"""Tests of the package ``farcall``."""
