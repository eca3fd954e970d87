"""The agent: both ends of calls.

``agent.py`` composes it; ``caller.py``, ``dispatcher.py`` and ``request_runner.py`` implement the path of a
call.
"""
