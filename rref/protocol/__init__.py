"""The reference protocol, without I/O, threads or clocks. Its theory is at the head of ``machine``."""
