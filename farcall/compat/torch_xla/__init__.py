"""PyTorch/XLA's modules for programs in SPMD mode, implemented with ours."""
