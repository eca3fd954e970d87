"""Large and ordered transfers: shared memory, bulk streams, and messages received into posted buffers."""
