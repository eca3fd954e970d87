"""Reads the state of a job in another process, and shows it."""
