"""The agent: calls at both ends.

``agent.py`` composes it; ``caller.py``, ``dispatcher.py`` and ``request_runner.py`` tell the story of a call.
"""
