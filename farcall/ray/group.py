"""A group of workers that Ray places: one actor for each, in a placement group."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import cloudpickle
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rpc  # noqa: F401  # whole, before its parts: several threads may import them at once
from rpc.errors import RendezvousTimeoutError, WorkerLostError
from rpc.lifecycle import outcomes
from rpc.lifecycle.local_processes import worker_names
from rpc.lifecycle.startup import init_rpc
from rpc.rendezvous.init_method import open_store
from rpc.runtime.current import current_agent, is_initialized

__all__ = ["run_group"]

logger = logging.getLogger(__name__)

_SETTLE_SECONDS: Final = 2.0
"""How long the other workers have to fail as well once one has, so that the cause is found among all."""

_SHOWN_OF_ERROR: Final = 300
"""Maximum length of Ray's explanation in an error."""

_NOTICE_SECONDS: Final = 10.0
"""Interval of the log lines about what is waited for."""


def run_group(
    main: Callable[..., Any],
    *args: Any,
    workers: int | Sequence[str] = 2,
    bundle: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    restarts: int = 0,
    timeout: float = 300.0,
) -> list[Any]:
    """Run a function on new workers that Ray places, and wait until all have returned.

    Each worker is an actor, in a bundle of one placement group. It joins the group, calls ``main(*args)``,
    and leaves gracefully, as with ``rpc.spawn``. It finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and
    ``TORCHELASTIC_RESTART_COUNT`` in its environment. Ray shows its output under its name. If a worker fails,
    calls to it raise ``WorkerLostError`` at the others, and all are ended.

    Args:
        main: what each runs; it tells workers apart by ``rpc.get_worker_info()``.
        args: for ``main``.
        workers: number of workers, called ``worker0``, ``worker1`` and so on; or their names, by rank.
        bundle: resources of one worker, as Ray names them; default ``{"CPU": 1}``.
        strategy: of the placement group: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        restarts: how often all workers are started again, in a new placement group, after one or its node was
            lost. Errors that ``main`` raises by itself are not followed by a restart.
        timeout: maximum time, in seconds, to wait for the resources.

    Returns:
        What ``main`` returned, by rank.

    Raises:
        WorkerLostError: a worker's process or node has died, and no restart was left.
        RpcError: ``main`` failed; says at which worker and has its traceback. Its ``__cause__`` is what was
            raised.
        RendezvousTimeoutError: Ray has not found the resources in time.

    Example::

        ray.init()
        losses = farcall.ray.run_group(train, workers=4, bundle={"CPU": 2})
    """
    names = worker_names(workers)
    resources = dict(bundle or {"CPU": 1})
    for attempt in range(restarts + 1):
        try:
            return _run(main, args, names, resources, strategy, attempt, timeout)
        except WorkerLostError as error:
            if attempt == restarts:
                raise
            logger.warning("%s; all are started again (%d of %d restarts)", error, attempt + 1, restarts)
    raise AssertionError("unreachable")


def _run(
    main: Callable[..., Any],
    args: tuple[Any, ...],
    names: Sequence[str],
    bundle: dict[str, float],
    strategy: str,
    attempt: int,
    timeout: float,
) -> list[Any]:
    """One attempt, in a placement group of its own."""
    group = placement_group([bundle] * len(names), strategy=strategy)
    try:
        _wait_for_resources(group, len(names), bundle, timeout)
        actors = [
            _WorkerActor.options(
                **_demand(bundle), scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)
            ).remote(name)
            for rank, name in enumerate(names)
        ]
        with_names = list(zip(names, actors, strict=True))
        try:
            return _results(with_names, _start(with_names, main, args, attempt))
        finally:
            for actor in actors:
                ray.kill(actor)
    finally:
        remove_placement_group(group)


def _wait_for_resources(group: Any, workers: int, bundle: Mapping[str, float], timeout: float) -> None:
    waited = 0.0
    while not ray.wait([group.ready()], timeout=min(_NOTICE_SECONDS, timeout - waited))[0]:
        waited += _NOTICE_SECONDS
        there = {key: value for key, value in ray.available_resources().items() if key in bundle}
        what = f"{workers} bundles of {dict(bundle)}; {there or 'nothing of that'} is free"
        if waited >= timeout:
            raise RendezvousTimeoutError(
                f"Ray has not placed {what}, for {timeout:g} s. Ask for fewer workers or smaller bundles, or "
                "add nodes; `ray status` shows what each node has."
            )
        logger.warning("Ray has not placed %s, for %.0f s", what, waited)


def _demand(bundle: Mapping[str, float]) -> dict[str, Any]:
    """A bundle as the options of an actor that takes all of it."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    for key, amount in bundle.items():
        if key in named:
            options[named[key]] = amount
        else:
            options["resources"][key] = amount
    return options


def _start(
    actors: Sequence[tuple[str, Any]], main: Callable[..., Any], args: tuple[Any, ...], attempt: int
) -> list[Any]:
    """Have all actors run ``main``; returns Ray's references to their outcomes."""
    hosts = [_get(name, actor.host.remote()) for name, actor in actors]
    master = _get(actors[0][0], actors[0][1].serve_store.remote())
    common = {
        "WORLD_SIZE": str(len(actors)),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "FARCALL_TOKEN": secrets.token_urlsafe(),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    running = []
    for rank, (_, actor) in enumerate(actors):
        local = {
            "RANK": str(rank),
            "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
            "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        }
        running.append(actor.run.remote(common | local, main, args))
    return running


def _get(name: str, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayActorError as error:
        raise _lost(name, error) from error


def _lost(name: str, error: Exception) -> WorkerLostError:
    reason = " ".join(str(error).split())[:_SHOWN_OF_ERROR]
    return WorkerLostError(f"worker '{name}' is lost: {reason}", name, reason)


def _results(actors: Sequence[tuple[str, Any]], running: list[Any]) -> list[Any]:
    """Wait until all have returned.

    Raises:
        WorkerLostError, RpcError: of the worker that failed first, as far as that can be told.
    """
    ended: dict[Any, outcomes.Outcome] = {}
    failures: list[tuple[int, BaseException]] = []
    """Each with how likely it is only the consequence of another one."""
    waiting = list(running)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_SETTLE_SECONDS if failures else None)
        if not done:
            break
        for reference in done:
            name = actors[running.index(reference)][0]
            try:
                outcome = cloudpickle.loads(ray.get(reference))
            except RayActorError as error:
                failures.append((0, _lost(name, error)))
                continue
            if len(outcome) == 1:
                ended[reference] = outcome
            else:
                is_consequence = isinstance(outcome[0], WorkerLostError)
                failures.append((1 + is_consequence, outcomes.failure(name, outcome)))
    if failures:
        raise min(failures, key=itemgetter(0))[1]
    return [ended[reference][0] for reference in running]


class _Worker:
    """One worker, as Ray runs it. Its representation is what Ray shows before its output."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._store: Any = None

    def __repr__(self) -> str:
        return self._name

    def host(self) -> str:
        """The address of its node."""
        return str(ray.util.get_node_ip_address())

    def serve_store(self) -> tuple[str, int]:
        """Serve the store where the workers meet; returns its host and port."""
        host = self.host()
        self._store = open_store(f"tcp://{f'[{host}]' if ':' in host else host}:0", 0, None, timeout=60)
        assert isinstance(self._store.store, TCPStore)
        return host, self._store.store.port

    def run(self, environment: dict[str, str], main: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
        """Join the group and call ``main``; returns the outcome, packed."""
        os.environ.update(environment)
        try:
            init_rpc(self._name)
            value = main(*args)
            if is_initialized():
                current_agent().shutdown()
            return outcomes.pack(outcomes.returned(value))
        except SystemExit as end:
            return outcomes.pack((end, "") if end.code else outcomes.returned(None))
        except Exception as error:
            return outcomes.pack(outcomes.failed(error))
        finally:
            if is_initialized():  # it has failed: the others notice at once
                current_agent().shutdown(graceful=False)


_WorkerActor: Any = ray.remote(_Worker)
