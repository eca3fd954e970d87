"""Traces of all workers of a job, as one file."""
