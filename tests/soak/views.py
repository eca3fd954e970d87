"""A member of an elastic job that stays while others are killed, leave and join must keep nothing of them.

::

    python -m tests.soak.views --views 1000

Members are started while there are fewer than three; then one is dismissed, or, each third time, killed by
SIGKILL. After a tenth of the views and after the last one, the member that stays counts its descriptors,
threads, segments of shared memory, the agent's own numbers (``rpc.get_debug_info``) and its memory. Prints
both, and fails if more is there at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rpc
from farcall import elastic
from spmd.collectives.sequencer import IDLE_SECONDS
from tests.soak.elastic import Members

__all__ = ["main"]

_SIZE: Final = 3
_GROWTH, _SLACK = 1.1, 2
"""What may be more at the end: a tenth, or two, as members change in the meantime."""
_UNDER_WAY: Final = {"agent.pending_calls", "agent.active_tasks", "agent.cancellable_requests"}
"""Numbers of what members ask one another at that moment."""
_PATIENCE: Final = 60.0
"""Maximum time in seconds until a change of members is over."""


def _counts() -> dict[str, int]:
    """What this process holds, once garbage is collected, and idle threads of groups have ended."""
    time.sleep(IDLE_SECONDS + 2)
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [resident] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mapped segments": sum("memfd" in line or "/dev/shm" in line for line in maps.splitlines()),
        "memory, KiB": int(resident.split()[1]),
        **{name: number for name, number in rpc.get_debug_info().items() if name not in _UNDER_WAY},
    }


def be_member(name: str, folder: Path, meeting: str, views: int) -> None:
    """The program of a member; the first one stays until the last view."""
    torch.set_num_threads(1)
    log = open(folder / f"{name}.log", "w", encoding="utf-8")  # noqa: SIM115  until the process ends

    def say(**what: Any) -> None:
        log.write(json.dumps(what) + "\n")
        log.flush()

    stays = name == "member0"
    rpc.init_rpc(name, rpc_backend_options=rpc.AgentOptions(init_method=meeting, dynamic=True))
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    leaving, seen = folder / f"{name}.leave", None
    counted_at = [views // 10, views] if stays else [sys.maxsize]
    with contextlib.suppress(elastic.Finished):
        job = elastic.join(model=model, optimizer=optimizer, sampler=elastic.Sampler(480, 48, seed=0))
        for attempt in job.attempts():
            with attempt:
                model(torch.ones(len(attempt.indices), 64)).sum().backward()
                optimizer.step()
                if not counted_at:
                    job.finish()
                elif leaving.exists():
                    job.leave()
            if attempt.committed and (job.view, job.size) != seen:
                seen = job.view, job.size
                say(view=job.view, members=sorted(job.members))
            if attempt.committed and job.size == _SIZE and counted_at and job.view >= counted_at[0]:
                del counted_at[0]
                say(counts=_counts())
        if not leaving.exists():
            job.leave()
    rpc.shutdown(graceful=stays)


def _said(folder: Path) -> list[dict[str, Any]]:
    """What the member that stays has logged."""
    found = []
    for line in (folder / "member0.log").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last line is being written
            found.append(json.loads(line))
    return found


def _members(folder: Path) -> list[str]:
    views = [entry["members"] for entry in _said(folder) if "members" in entry]
    return views[-1] if views else []


def _change(members: Members, folder: Path, views: int, seed: int) -> int:
    """Kill, dismiss and start members until the last view; returns the number of deaths."""
    chance = random.Random(seed)
    deaths = 0
    for turn in range(views * 2):
        wanted = set(members.living)
        limit = time.monotonic() + _PATIENCE
        while set(_members(folder)) != wanted:
            members.collect()
            if "member0" not in members.living:
                return deaths
            if time.monotonic() > limit:
                raise TimeoutError(f"the job has {_members(folder)}, not {sorted(wanted)}: {folder}")
            time.sleep(0.005)
        if len(wanted) < _SIZE:
            members.start()
            continue
        victim = chance.choice(sorted(wanted - {"member0"}))
        if turn % 3 == 2:
            os.kill(members.living[victim], signal.SIGKILL)
            deaths += 1
        else:
            (folder / f"{victim}.leave").touch()
        while victim in members.living:
            members.collect()
            time.sleep(0.002)
    return deaths


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.views", description=__doc__)
    parser.add_argument("--views", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("FARCALL_TOKEN", "soak-soak-soak-soak-soak")
    folder = Path(tempfile.mkdtemp(prefix="farcall-views-"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = f"tcp://127.0.0.1:{store.port}"
    members = Members(folder, lambda name, _: be_member(name, folder, meeting, options.views))
    for _ in range(_SIZE):
        members.start()
    while not (folder / "member0.log").exists():
        time.sleep(0.01)
    deaths = _change(members, folder, options.views, options.seed)
    limit = time.monotonic() + _PATIENCE
    while members.living and time.monotonic() < limit:
        members.collect()
        time.sleep(0.01)
    early, late = [entry["counts"] for entry in _said(folder) if "counts" in entry]
    wrong = [f"{name} hangs" for name in members.living]
    wrong += [
        f"{name} has exit status {code}" for name, code in members.statuses.items() if code not in (0, -9)
    ]
    for name, number in late.items():
        print(f"{name}: {early[name]} -> {number}")
        if number > max(_GROWTH * early[name], early[name] + _SLACK):
            wrong.append(f"more {name}")
    print(f"{len([each for each in _said(folder) if 'view' in each])} views, {deaths} deaths")
    for each in wrong:
        print("WRONG:", each)
    print(f"logs: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
