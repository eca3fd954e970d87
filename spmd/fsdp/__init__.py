"""Fully sharded data parallelism, version 2 of PyTorch/XLA's: marks on parameters and outputs."""
