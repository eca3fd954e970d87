"""Speed of farcall beside that of ``torch.distributed.rpc``, in one run: ``python -m benchmarks``."""
