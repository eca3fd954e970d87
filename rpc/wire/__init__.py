"""The wire format, without I/O: frames, their decoder, and large messages in chunks."""
