"""Serialization of calls, values and exceptions: see ``serializer``."""
