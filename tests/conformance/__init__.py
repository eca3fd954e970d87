"""PyTorch's own RPC test suites, against farcall."""
