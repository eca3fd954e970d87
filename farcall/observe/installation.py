"""Observes each process with an agent: an extension of agents, found by its entry point.

``FARCALL_OBSERVE=0`` in the environment turns it off.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from farcall.observe import tracing
from farcall.observe.format.jobs import JOB, job_id
from farcall.observe.worker import telemetry
from farcall.observe.worker.call_frames import running
from farcall.observe.worker.counters import COUNT, EXTENSION, SWITCH, Counters
from farcall.observe.worker.far_hosts import FarHosts, ignore
from farcall.observe.worker.observer import Observer, program_name
from farcall.observe.worker.slow_calls import SlowCallReports
from rpc.agent.agent import Agent
from rpc.runtime.code_folders import LIBRARIES
from rpc.serialization.failures import text_of

__all__ = ["begin", "failed", "install", "observer"]

_SWITCH: Final = "FARCALL_OBSERVE"

_MAX_ERROR: Final = 300
"""Maximum number of characters of a program's last exception."""

_LOOPBACK: Final = ("localhost", "127.", "[::1]", "::1")

_lock = threading.Lock()
_numbers = itertools.count(1)
_observer: Observer | None = None


def observer() -> Observer | None:
    """Return the observer of this process; None if there is none."""
    return _observer


def install(agent: Agent) -> None:
    """Observe this process for as long as the agent lives."""
    global _observer
    tracing.install(agent)
    telemetry.install(agent)
    if os.environ.get(_SWITCH) == "0":
        ignore(agent)
        return
    with _lock:
        # A child of a process that was observed before it had an agent has no observing thread.
        if _observer is None or _observer.identity["pid"] != os.getpid():
            facts = _identity() | {"incarnation": agent.incarnation}
            _observer = _new_observer(facts, os.environ.get(JOB) or job_id("joining", _meeting_place(agent)))
            _observer.add(agent)
            _observer.start()
        else:
            if _observer.identity["phase"] == "starting":
                _observer.identify(phase="joining", incarnation=agent.incarnation)
            _observer.add(agent)
        found = _observer
    agent.extensions["observe"] = found
    counters = agent.extensions[EXTENSION] = Counters(agent)
    found.orders.on(COUNT, lambda _: counters.begin())
    if os.environ.get(SWITCH) == "1":
        counters.begin()
    SlowCallReports(found, agent, FarHosts(found, agent))
    agent.calls.running = running
    hooks = agent.lifecycle.hooks
    hooks.formed.append(partial(_identify, found, agent))
    hooks.close.append(lambda: found.identify(phase="leaving"))
    hooks.closed.append(lambda: _ended(found, agent))
    hooks.forked.append(_forked)


def begin(environ: Mapping[str, str], program: str) -> None:
    """Observe this process before it has an agent, if a launcher has named its job: a group that waits for a
    rank waits for what the rank does before it joins.

    Args:
        environ: the environment.
        program: name of the program, for people.
    """
    global _observer
    if environ.get(JOB) and environ.get(_SWITCH) != "0":
        with _lock:
            facts = _identity() | {"phase": "starting", "program": program}
            _observer = _new_observer(facts, environ[JOB])
            _observer.start()


def failed(error: BaseException) -> None:
    """Note the exception that ends the program of this process."""
    if _observer is not None:
        text = " ".join(text_of(error).split())[:_MAX_ERROR]
        _observer.identify(error=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _new_observer(facts: dict[str, Any], job: str) -> Observer:
    made = Observer(facts, job)
    tracing.follow_orders(lambda: made.agents, made.orders.on)
    return made


def _identity() -> dict[str, Any]:
    rank = os.environ.get("RANK", "")
    return {
        "name": "",
        "rank": int(rank) if rank.isdecimal() else -1,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "number": next(_numbers),
        "phase": "joining",
        "program": program_name(),
        "began": time.time(),
        "folder": _folder(),
        "python": sys.version.split()[0],
        "libraries": list(LIBRARIES),
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _meeting_place(agent: Agent) -> str:
    """Return the address at which the workers of a group meet; it has the name of this host if it is one of
    its loopback interface.
    """
    method = urlsplit(getattr(agent.options, "init_method", "") or "env://")
    if method.scheme == "env":
        place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    else:
        place = method.netloc or method.path
    host, _, port = place.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.startswith(_LOOPBACK) else place


def _identify(found: Observer, agent: Agent, key: str) -> None:
    """Write the identity before any other worker can call: the interpreter may not run again after that."""
    if found.identity["phase"] != "joining":
        return
    given = os.environ.get(JOB)
    # The key of a dynamic group is only its name, "default" unless the user has chosen one.
    of_group = job_id(key) if agent.is_static_group else job_id(key, _meeting_place(agent))
    facts = {
        "name": agent.info.name,
        "rank": agent.info.id,
        "group": key,
        "static": agent.is_static_group,
        "phase": "running",
    }
    found.identify(given or of_group, **facts)
    found.look_now()


def _ended(found: Observer, agent: Agent) -> None:
    global _observer
    if found.remove(agent):
        error = getattr(sys, "last_value", None)  # the interpreter has printed it, and ends
        if isinstance(error, Exception) and not hasattr(sys, "ps1") and not found.identity.get("error"):
            failed(error)
        with _lock:
            if _observer is found:
                _observer = None
        found.stop("left")


def _forked() -> None:
    global _observer
    if _observer is not None:
        _observer.abandon()
        _observer = None
