"""Serves the page: the files of ``static``, and the data as JSON and as server-sent events. Thin.

``access`` decides which requests are answered. Connections, event streams and the sizes of requests are
bounded, and no request is logged: an address may hold the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from farcall.observe.format.jobs import JobFolder, find_job, jobs
from farcall.observe.reading.kept_output import KeptOutput
from farcall.observe.reading.reader import read_job
from farcall.observe.reading.stacks import chosen
from farcall.observe.why.analysis import analyze
from farcall.page.access import Access, Refusal
from farcall.page.view import PastJob, past_job
from farcall.page.watcher import Watcher
from farcall.page.worker_view import worker_view

__all__ = ["Server"]

logger = logging.getLogger(__name__)

_unheard = logging.getLogger(f"{__name__}.requests")
"""Logger for aiohttp that writes nothing: its records of malformed requests hold headers, with the token."""
_unheard.addHandler(logging.NullHandler())
_unheard.propagate = False
_unheard.disabled = True

MAX_CONNECTIONS: Final = 64
"""Maximum number of connections with the token at a time. Connections of which no request had it have as many
places of their own, where the oldest gives way to a new one.
"""

_BACKLOG: Final = 1024
"""Maximum number of connections that wait to be accepted: if others fill them, the kernel ignores the owner's
for a second or more.
"""

_MAX_STREAMS: Final = 12
"""Maximum number of event streams at a time."""

_MAX_WATCHERS: Final = 4
"""Maximum number of jobs that are watched at a time."""

_MAX_FIELD_BYTES: Final = 16384
"""Maximum length of a header, in bytes. The cookies of all ports of 127.0.0.1 come in one header."""

_FIRST_REQUEST_SECONDS: Final = 10.0
"""Time in which a connection must have made a request, in seconds."""

_WRITE_SECONDS: Final = 20.0
"""Time after which an event that the browser does not take ends its stream, in seconds."""

_PING_SECONDS: Final = 15.0
"""Maximum time between two events, in seconds."""

_MAX_READ: Final = 20
"""Maximum number of jobs that are read for the history at a time: the newest."""

_MAX_LOG_LINES: Final = 500
_MAX_LOG_CHARACTERS: Final = 4000

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

_TYPES: Final = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
    "txt": "text/plain",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves the page of one job, and those of this user's other jobs. Runs on one event loop.

    Args:
        jobs_folder: the folder of all jobs.
        job: the job that the page shows first.
        token: what requests must carry.
    """

    def __init__(self, jobs_folder: Path, job: JobFolder, token: str) -> None:
        self._jobs_folder = jobs_folder
        self._job = job
        self._token = token
        self._ended: dict[str, PastJob] = {}
        """Jobs that are over, as they have been read, by id."""
        self._without: dict[str, float] = {}
        """When jobs that had no readable state were last written, by id."""
        self._watchers: dict[str, Watcher] = {}
        self._streams = 0
        self._stopping = False
        self._unknown: dict[web.RequestHandler, None] = {}
        """Connections of which no request has shown the token, the oldest first."""
        self._known: set[web.RequestHandler] = set()
        """Connections of which one has; those that have ended since are removed when there is a new one."""
        self._news: asyncio.Condition
        self._access: Access
        self._files = {
            each.name: (each.read_bytes(), _TYPES[each.name.rpartition(".")[2]])
            for each in resources.files("farcall.page").joinpath("static").iterdir()
            if each.name.rpartition(".")[2] in _TYPES
        }

    async def run(self, port: int, ready: Callable[[str], object], stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set.

        Args:
            port: port of 127.0.0.1; 0: a free one.
            ready: called with the page's address when it is served.

        Raises:
            OSError: the port cannot be listened on.
        """
        listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        port = listener.getsockname()[1]
        self._access = Access(self._token, port)
        self._news = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[self._guard], client_max_size=1)
        app.add_routes(
            [
                web.get("/", self._index, allow_head=False),
                web.get("/static/{name}", self._static, allow_head=False),
                web.get("/api/events", self._events, allow_head=False),
                web.get("/api/worker", self._worker, allow_head=False),
                web.get("/api/logs", self._logs, allow_head=False),
                web.get("/api/jobs", self._jobs, allow_head=False),
            ]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_unheard,
            handle_signals=False,
            keepalive_timeout=30.0,
            lingering_time=0.5,
            max_line_size=2048,
            max_field_size=_MAX_FIELD_BYTES,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        assert runner.server is not None
        made = runner.server
        server = await self._loop.create_server(
            lambda: self._connected(made), sock=listener, backlog=_BACKLOG
        )
        self._watch(self._job)
        try:
            ready(f"http://127.0.0.1:{port}/?token={self._token}")
            await stop.wait()
        finally:
            server.close()
            async with self._news:
                self._stopping = True
                self._news.notify_all()
            await runner.cleanup()
            for watcher in self._watchers.values():
                await asyncio.to_thread(watcher.stop)

    def _connected(self, server: web.Server) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if len(self._unknown) >= MAX_CONNECTIONS:
            self._end_if_unknown(next(iter(self._unknown)))
        handler = server()
        self._unknown[handler] = None
        self._loop.call_later(_FIRST_REQUEST_SECONDS, self._end_if_unknown, handler)
        return handler

    def _end_if_unknown(self, handler: web.RequestHandler) -> None:
        self._unknown.pop(handler, None)
        if handler not in self._known and handler.transport is not None:
            handler.transport.abort()

    def _has_place(self, handler: web.RequestHandler) -> bool:
        """Whether a connection, of which a request has shown the token, may stay."""
        if handler not in self._known:
            self._known = {each for each in self._known if each.transport is not None}
            if len(self._known) >= MAX_CONNECTIONS:
                return False
            self._known.add(handler)
        self._unknown.pop(handler, None)
        return True

    # ---- who may ask

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self._access.refuse(request.method, request.raw_path, request.headers)
        if refusal is None:
            refusal = self._without_token(request)
        if refusal is not None:
            return _answer(refusal)
        if not self._has_place(request.protocol):
            return _answer(Refusal(503, f"the page has {MAX_CONNECTIONS} connections, all that it may have"))
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _answer(Refusal(error.status, error.reason))
        except Exception:
            logger.exception("answering a request for %s failed", request.path)
            response = _answer(Refusal(500, "this request failed: `farcall page` has printed why"))
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _without_token(self, request: web.Request) -> Refusal | None:
        if request.path.startswith("/api/"):
            opened = self._access.opens_data(request.headers.get("Authorization"))
        else:
            cookie = request.cookies.get(self._access.cookie_name)
            opened = self._access.opens_files(request.query.get("token"), cookie)
        return None if opened else Refusal(401, "open the address that `farcall page` has printed")

    # ---- files

    async def _index(self, request: web.Request) -> web.Response:
        response = self._file("index.html")
        if "token" in request.query:
            response.set_cookie(
                self._access.cookie_name, self._access.cookie, httponly=True, samesite="Strict", path="/"
            )
        return response

    async def _static(self, request: web.Request) -> web.Response:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        if name not in self._files:
            raise web.HTTPNotFound
        body, kind = self._files[name]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    # ---- data

    async def _watcher_of(self, request: web.Request, *, begin: bool = False) -> Watcher:
        """The watcher of the job that a request names; with ``begin``, a new one if there is none."""
        given = request.query.get("job", self._job.id)
        known = self._watchers.get(given)
        if known is not None:
            return known
        try:
            folder = await asyncio.to_thread(find_job, self._jobs_folder, given)
        except LookupError:
            raise web.HTTPNotFound from None
        known = self._watchers.get(folder.id)
        if known is not None:
            return known
        if not begin:
            raise web.HTTPNotFound
        if len(self._watchers) >= _MAX_WATCHERS:
            raise web.HTTPTooManyRequests
        return self._watch(folder)

    def _watch(self, folder: JobFolder) -> Watcher:
        watcher = self._watchers[folder.id] = Watcher(folder, self._looked)
        watcher.start()
        return watcher

    async def _left(self, watcher: Watcher) -> None:
        """A viewer has gone: a job that nobody views is not watched, other than the page's own."""
        if watcher.add_viewer(-1) == 0 and watcher.folder.id != self._job.id:
            self._watchers.pop(watcher.folder.id, None)
            await asyncio.to_thread(watcher.stop)

    def _looked(self) -> None:
        """On a watcher's thread."""

        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(tell()))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._streams >= _MAX_STREAMS:
            raise web.HTTPTooManyRequests
        watcher = await self._watcher_of(request, begin=True)
        self._streams += 1
        watcher.add_viewer()
        response = web.StreamResponse(headers=_HEADERS)
        response.content_type = "text/event-stream"
        try:
            await response.prepare(request)
            await self._stream(watcher, response)
        except (ConnectionError, TimeoutError):
            pass  # it has gone, or takes nothing
        except Exception:  # the answer has begun: it can only end
            logger.exception("the events of job %s have ended", watcher.folder.id)
        finally:
            self._streams -= 1
            await self._left(watcher)
        return response

    async def _stream(self, watcher: Watcher, response: web.StreamResponse) -> None:
        """Send each look of a watcher; one who is slow misses some."""
        number, version, at = 0, 0, 0.0
        while not self._stopping:
            watched = watcher.watched
            if watched is None or watched.number == number:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PING_SECONDS), self._news:
                        await self._news.wait()
                        continue
                await asyncio.wait_for(response.write(b": still here\n\n"), _WRITE_SECONDS)
                continue
            number = watched.number
            version, tasks = watcher.tasks_since(version)
            points = watcher.points_since(at)
            at = points[-1][0] if points else at
            event = {"view": watched.view, "tasks": tasks, "points": points}
            packed = _packed(event).encode()
            await asyncio.wait_for(response.write(b"data: " + packed + b"\n\n"), _WRITE_SECONDS)

    async def _worker(self, request: web.Request) -> web.Response:
        watcher = await self._watcher_of(request)
        watched = watcher.watched
        found = None if watched is None else worker_view(watched.report, request.query.get("name", ""))
        if found is None:
            raise web.HTTPNotFound
        return web.json_response(found, dumps=_packed)

    async def _logs(self, request: web.Request) -> web.Response:
        watcher = await self._watcher_of(request)
        watched = watcher.watched
        if watched is None:
            raise web.HTTPNotFound
        name = request.query.get("name", "")
        try:
            workers = chosen(watched.job, [name] if name else [])
            lines = await asyncio.to_thread(
                lambda: KeptOutput(watcher.folder.path).last_by_time(workers, _MAX_LOG_LINES)
            )
        except LookupError as error:
            return web.json_response({"lines": [], "trouble": str(error.args[0])})
        prefix = f"{name}  " if name else ""
        shown = [line.removeprefix(prefix)[:_MAX_LOG_CHARACTERS] for line in lines]
        return web.json_response({"lines": shown, "trouble": ""})

    async def _jobs(self, _: web.Request) -> web.Response:
        """Answer with this user's jobs, the one that was seen last first, as far as their files are kept."""
        here = await asyncio.to_thread(jobs, self._jobs_folder)
        watched = {name: each.past_job() for name, each in self._watchers.items()}
        known = {name: each for name, each in watched.items() if each is not None}
        unread = [
            each
            for each in here
            if each.id not in known
            and each.id not in self._ended
            and self._without.get(each.id) != each.written
        ]
        for folder in sorted(unread, key=lambda each: (each.id in self._without, -each.written))[:_MAX_READ]:
            self._without.pop(folder.id, None)
            found = past_job(analyze(await asyncio.to_thread(read_job, folder)))
            if found is not None:
                (known if found.state == "running" else self._ended)[found.id] = found
            else:
                self._without[folder.id] = folder.written
        self._ended = {each.id: self._ended[each.id] for each in here if each.id in self._ended}
        self._without = {each.id: self._without[each.id] for each in here if each.id in self._without}
        listed = sorted({**self._ended, **known}.values(), key=lambda each: -each.seen)
        return web.json_response({"shown": self._job.id, "jobs": [each.to_json() for each in listed]})


def _packed(value: object) -> str:
    """As JSON, which has no NaN and no infinities: they become 0."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else 0.0
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def _answer(refusal: Refusal) -> web.Response:
    response = web.Response(status=refusal.status, text=f"{refusal.why}\n", headers=_HEADERS)
    response.force_close()
    return response
