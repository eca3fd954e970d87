"""Tests of ``rpc.rendezvous``."""
