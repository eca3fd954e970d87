"""Mutated bytes and messages, as strangers and members might send them, to pure parts and a real agent."""
