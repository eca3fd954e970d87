"""What looks at a worker, in its own process."""
