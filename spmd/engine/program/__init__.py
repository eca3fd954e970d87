"""What the driver and the workers of SPMD mode both know: programs, layouts, and the messages between."""
