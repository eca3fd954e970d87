"""What PyTorch/XLA's modules offer to programs for its SPMD mode, made of ours."""
