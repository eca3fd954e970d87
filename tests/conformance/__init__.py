"""PyTorch's own test suites, against farcall."""
