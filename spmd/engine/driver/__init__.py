"""The driver of SPMD mode: the device, the recording of operations, and the session with the workers."""
