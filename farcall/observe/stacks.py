"""Stacks of the threads of workers, as lines."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Final

from farcall.observe.places import Place
from farcall.observe.state import JobState, ThreadState, WorkerState, items

__all__ = ["chosen", "native_stacks", "stack_lines"]

_NATIVE_SECONDS: Final = 30.0


def chosen(job: JobState, names: Sequence[str]) -> list[WorkerState]:
    """The workers of these names or ranks; all without any.

    Raises:
        LookupError: there is no such worker; says which there are.
    """
    if not names:
        return list(job)
    found = []
    for name in names:
        worker = next((each for each in job if name in (each.name, str(each.rank))), None)
        if worker is None:
            known = ", ".join(each.name for each in job)
            raise LookupError(f"job {job.id} has no worker {name!r}; there are: {known or 'none'}")
        found.append(worker)
    return found


def stack_lines(worker: WorkerState, *, everything: bool = False) -> Iterator[str]:
    """The threads of a worker, the innermost place of each first."""
    if worker.is_frozen and worker.frozen:
        yield f"{worker.name}: its interpreter does not run; stacks written without it"
        names = {each.id: each.name for each in worker.threads}
        for ident, stack in worker.frozen.items():
            yield f"  {names.get(ident, f'thread {ident:#x}')}"
            yield from _places([Place(*each) for each in stack.frames])
        return
    when = f"as of {worker.silent:.1f} s ago" if worker.process.alive else "at its last look"
    yield f"{worker.name} ({when})"
    idle = 0
    for thread in worker.threads:
        if thread.fields.get("idle") and not thread.waits and not everything:
            idle += 1
            continue
        yield f"  {thread.name}{_doing(thread)}"
        yield from _places(thread.stack)
    for request in worker.requests:
        places = [Place.of(each) for each in items(request.get("stack"))]
        if places:
            yield f"  coroutine for {request.get('from')}, {worker.age(request.get('began')):.1f} s"
            yield from _places([each for each in places if each is not None])
    if idle:
        yield f"  and {idle} idle threads (--all)"


def _doing(thread: ThreadState) -> str:
    if thread.fields.get("computes"):
        return ": computes"
    doing = str(thread.fields.get("doing") or "")
    on = thread.fields.get("on")
    return f": {doing}{f' `{on}`' if on else ''}" if doing else ""


def _places(places: Sequence[Place]) -> Iterator[str]:
    for place in places:
        yield f"    {place.function}  {place.file}:{place.line}"


def native_stacks(worker: WorkerState) -> list[str]:
    """The stacks of a living worker with native frames.

    Raises:
        OSError: py-spy is not installed, or fails; says why.
    """
    program = shutil.which("py-spy")
    if program is None:
        raise OSError("--native needs py-spy: pip install py-spy")
    done = subprocess.run(
        [program, "dump", "--native", "--pid", str(worker.pid)],
        capture_output=True,
        text=True,
        timeout=_NATIVE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise OSError(f"py-spy cannot look at {worker.name}: {done.stderr.strip()}")
    shown = [
        "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
        for line in done.stdout.splitlines()
    ]
    return [worker.name, *(f"  {line}" for line in shown)]
