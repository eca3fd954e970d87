"""PyTorch's own RPC test suites, run against farcall: ``python -m tests.conformance``.

The torch wheel carries the suites of ``torch.distributed.rpc``. With ``farcall.compat`` installed they test
farcall instead. Each test is a few processes, forked from one that has PyTorch imported already, so that a
test takes about as long as what it does. ``--backend torch`` runs the very same tests against PyTorch: the
baseline, and the proof that the harness changes nothing.
"""
