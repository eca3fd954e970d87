"""Finds out what the workers of a job wait for, and why."""
