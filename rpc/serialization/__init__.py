"""How calls, values and exceptions become bytes, and back: see ``serializer``."""
