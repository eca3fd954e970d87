"""Connections between processes: one file for each transport, and a registry of transports."""
