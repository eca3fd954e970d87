"""The agent: both ends of calls.

``agent.py`` composes it. A call goes through ``calls.py`` and ``dispatcher.py``, and at its callee through
``received_requests.py``.
"""
