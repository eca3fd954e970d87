"""Mutated bytes and messages, as strangers and members might send them, against pure parts and a real agent."""
