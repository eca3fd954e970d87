"""Metrics of a job, for Prometheus."""
