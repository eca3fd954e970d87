"""Threads that read the connection that they wait for."""
