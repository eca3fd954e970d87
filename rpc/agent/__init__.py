"""The agent: both ends of calls.

``agent.py`` composes it. A call goes through ``caller.py`` and ``dispatcher.py``, and at its callee through
``received_requests.py``, ``request_runner.py`` and ``answer_sender.py``.
"""
