"""Tests of ``farcall.grpc``."""
