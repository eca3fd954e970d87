"""Random programs, compared with one process."""
