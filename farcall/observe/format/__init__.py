"""The files in which workers show their state: where they are, and what is in them."""
