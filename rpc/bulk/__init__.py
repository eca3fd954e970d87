"""Large and ordered transfers: shared memory, striping, and messages received into posted buffers."""
