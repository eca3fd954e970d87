"""What takes minutes, run by hand: ``python -m tests.soak.NAME``."""
