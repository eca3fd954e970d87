"""Tests on the newest Python and PyTorch that can be had here; see ``tests.newest.environment``."""
