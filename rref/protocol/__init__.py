"""The reference protocol, without I/O, threads or clocks. Its theory stands at the head of ``machine``."""
