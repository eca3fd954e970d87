"""PyTorch's profilers see calls, and what their callees do."""
