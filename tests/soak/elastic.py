"""Kill members of an elastic job at random moments, and check what the others have computed.

python -m tests.soak.elastic --seconds 60                # SIGKILL of one of three members, every 3 s
python -m tests.soak.elastic --seconds 60 --at-once 2    # of two at once
python -m tests.soak.elastic --stop 40                   # SIGSTOP for 40 s, beyond the limits, in place of
SIGKILL
python -m tests.soak.elastic --hosts                     # on two hosts: network namespaces; needs root
python -m tests.soak.elastic --cut 20                    # the link between them is cut for 20 s, in place of
SIGKILL
python -m tests.soak.elastic --seconds 600 --leaks       # does a member that stays keep anything of others?

Each killed member is replaced by a new process after half a second. At the end the survivors must have
committed the same steps without a gap, have bitwise equal weights, and have used each sample of each step
exactly once; and the weights must be those of one process, up to the order of sums (1e-9, in float64). Prints
the time lost by each kill: the longest pause between two committed steps after it, less a usual step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rpc
from farcall import elastic
from spmd.collectives.sequencer import IDLE_SECONDS
from tests.soak.processes import Processes
from tests.support.network_namespaces import Hosts, enter

__all__ = ["main"]

torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.1)  # imports what the first optimizer needs

_LENGTH: Final = 960
_BATCH: Final = 48
_CUT_LOST_AFTER: Final = 5
"""Seconds of silence after which members are lost where links are cut; by default it is 30."""
_GROWTH, _SLACK = 1.1, 2
"""What a member that stays may have more of at the end: a tenth, or two, as others change in the meantime."""
_UNDER_WAY: Final = {"agent.pending_calls", "agent.active_tasks", "agent.cancellable_requests"}
"""Numbers of what members ask one another at that moment."""


def make_model() -> nn.Module:
    """A model in float64, with equal weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10)).double()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_LENGTH, 32, generator=generator, dtype=torch.float64)
    return x, (x @ torch.randn(32, 10, generator=generator, dtype=torch.float64)).argmax(1)


class Used:
    """The samples that were used: part of the state."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def digest(*modules: Any) -> str:
    """A digest of weights and optimizers' states."""
    found = hashlib.sha256()
    for module in modules:
        for key, value in sorted(_flat(module.state_dict()), key=lambda each: each[0]):
            found.update(key.encode())
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()[:16]


def _flat(state: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(state, dict):
        return [each for key, value in state.items() for each in _flat(value, f"{prefix}.{key}")]
    return [(prefix, state)]


def be_member(name: str, folder: Path, options: argparse.Namespace, network: dict[str, Any]) -> None:
    """The program of a member; ``network`` holds the agent's options for it."""
    log = open(folder / f"{name}.log", "w", encoding="utf-8")  # noqa: SIM115  until the process ends

    def say(what: str, **more: Any) -> None:
        log.write(json.dumps({"t": time.monotonic(), "what": what, **more}) + "\n")
        log.flush()

    rpc.init_rpc(name, rpc_backend_options=rpc.AgentOptions(dynamic=True, **network))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = make_data()
    used, leaving = Used(), folder / f"{name}.leave"
    try:
        job = elastic.join(
            model=model, optimizer=optimizer, used=used, sampler=elastic.Sampler(_LENGTH, _BATCH, seed=3)
        )
        say("joined")
        for attempt in job.attempts():
            if (folder / "stop").exists():
                job.finish()
            with attempt:
                if leaving.exists():
                    job.leave()
                i = attempt.indices
                used.steps.append(str(attempt.step))  # put back if the attempt is repeated
                loss = nn.functional.cross_entropy(model(x[i]), y[i], reduction="sum") / attempt.batch_size
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if attempt.committed:
                say("commit", step=attempt.step, view=attempt.view, size=attempt.size, samples=i.tolist())
            if name == "member0" and attempt.size == options.members and (folder / "count").exists():
                (folder / "count").unlink()
                say("counts", counts=counts())
        if not leaving.exists():
            job.leave()
    except elastic.Finished as finished:
        say("finished", step=finished.step)
    except elastic.PutOut as out:
        say("put out", text=str(out))
    else:
        if not leaving.exists():
            contiguous = used.steps == [str(each) for each in range(job.step)]
            say("end", digest=digest(model, optimizer), steps=job.step, contiguous=contiguous)
            torch.save(model.state_dict(), folder / f"{name}.pt")
    rpc.shutdown()


class Members(Processes):
    """The processes of a job.

    Args:
        folder: folder of their logs.
        program: the program of a member, called with its name and host.

    Attributes:
        hosts: the host of each member that was started.
    """

    def __init__(self, folder: Path, program: Callable[[str, int], object]) -> None:
        super().__init__(folder)
        self._program = program
        self.hosts: dict[str, int] = {}

    def add(self, host: int = 0) -> None:
        """Start one more."""
        name = f"member{len(self.hosts)}"
        self.hosts[name] = host
        self.start(name, functools.partial(self._program, name, host))


def counts() -> dict[str, int]:
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


def entries(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All that members have logged."""
    found = []
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed one
                found.append((path.stem, json.loads(line)))
    return found


def alone(steps: int) -> nn.Module:
    """The same training in one process."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x, y = make_data()
    sampler = elastic.Sampler(_LENGTH, _BATCH, seed=3)
    for step in range(steps):
        i = sampler.batch(step)
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[i]), y[i], reduction="sum") / _BATCH).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def disturb(
    members: Members, folder: Path, options: argparse.Namespace, hosts: Hosts | None
) -> list[tuple[float, list[str]]]:
    """Kill or stop members, or cut the link between hosts, until the time is over."""
    chance = random.Random(options.seed)
    end, next_kill = time.monotonic() + options.seconds, time.monotonic() + options.every
    kills: list[tuple[float, list[str]]] = []
    due: list[tuple[float, int]] = []
    passing: list[tuple[float, Callable[[], object]]] = []
    """What ends stops and cuts, and when."""
    is_counted = False
    while time.monotonic() < end or passing or (options.leaks and due):
        now = time.monotonic()
        if options.leaks and not is_counted and now > end - 0.9 * options.seconds:
            is_counted = True
            (folder / "count").touch()
        members.collect()
        for when, host in [each for each in due if each[0] <= now]:
            due.remove((when, host))
            members.add(host)
        for each in [each for each in passing if each[0] <= now]:
            passing.remove(each)
            each[1]()
        if now >= next_kill and now < end and not passing:
            training = {name for name, entry in entries(folder) if entry["what"] == "commit"} & set(
                members.living
            )
            victims: list[str] = []
            if options.cut and hosts is not None:
                if (
                    len(training) == len(members.living) == options.members
                ):  # those that were put out have ended
                    victims = sorted(name for name in training if members.hosts[name] == 1)
            elif len(training) > options.at_once:
                candidates = training - {"member0"} if options.leaks else training
                victims = chance.sample(sorted(candidates), options.at_once)
            if victims and options.cut and hosts is not None:
                hosts.set_link(0, "down")
                passing.append((now + options.cut, functools.partial(hosts.set_link, 0, "up")))
                due += [(now + options.cut + 1, 1) for _ in victims]
            else:
                for name in victims:
                    pid = members.living[name]
                    if options.leaks and len(kills) % 3:
                        (folder / f"{name}.leave").touch()
                    else:
                        os.kill(pid, signal.SIGSTOP if options.stop else signal.SIGKILL)
                    if options.stop:
                        passing.append((now + options.stop, functools.partial(os.kill, pid, signal.SIGCONT)))
                    else:
                        due.append((now + 0.5, members.hosts[name]))
            if victims:
                kills.append((now, victims))
                next_kill = now + options.every * (0.5 + chance.random())
        time.sleep(0.002)
    return kills


def growth(said: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Print what the member that stays has at first, and in the end; returns what is more."""
    early, late = [entry["counts"] for _, entry in said if entry["what"] == "counts"]
    for name, number in late.items():
        print(f"{name}: {early[name]} -> {number}")
    return [
        f"more {name}"
        for name, number in late.items()
        if number > max(_GROWTH * early[name], early[name] + _SLACK)
    ]


def report(folder: Path, members: Members, kills: list[tuple[float, list[str]]]) -> list[str]:
    """Print figures; returns what is wrong."""
    said = entries(folder)
    wrong = [
        f"{name} has exit status {status}"
        for name, status in members.statuses.items()
        if status not in (0, -9)
    ]
    wrong += [f"{name} hangs" for name in members.living]
    ends = [(name, entry) for name, entry in said if entry["what"] == "end"]
    if not ends:
        return [*wrong, "no member has reached the end"]
    if len({entry["digest"] for _, entry in ends}) > 1:
        wrong.append(f"members differ: {[(name, entry['digest']) for name, entry in ends]}")
    wrong += [f"{name} has repeated or left out steps" for name, entry in ends if not entry["contiguous"]]
    steps = ends[0][1]["steps"]
    commits: dict[int, list[tuple[float, int, list[int]]]] = {}
    for _, entry in said:
        if entry["what"] == "commit":
            commits.setdefault(entry["step"], []).append((entry["t"], entry["view"], entry["samples"]))
    sampler = elastic.Sampler(_LENGTH, _BATCH, seed=3)
    for step in range(steps):
        parts = commits.get(step, [])
        if len({view for _, view, _ in parts}) > 1:
            wrong.append(f"step {step} was committed in views {sorted({view for _, view, _ in parts})}")
        samples = [each for _, _, part in parts for each in part]
        whole = set(sampler.batch(step).tolist())
        # A member that was killed right after the commit has not logged its part.
        if (
            len(samples) != len(set(samples))
            or not set(samples) <= whole
            or (not kills and set(samples) != whole)
        ):
            wrong.append(f"the samples of step {step} are not its batch")
    model = alone(steps)
    final = torch.load(folder / f"{ends[0][0]}.pt")
    far = max(float((final[key] - value).abs().max()) for key, value in model.state_dict().items())
    print(f"difference from one process after {steps} steps: {far:.1e}")
    if far > 1e-9:
        wrong.append("the weights are not those of one process")
    times = sorted(min(when for when, _, _ in parts) for parts in commits.values())
    pauses = list(itertools.pairwise(times))
    usual = sorted(after - before for before, after in pauses)[len(pauses) // 2]
    lost = []
    for index, (when, _) in enumerate(kills):
        until = kills[index + 1][0] if index + 1 < len(kills) else when + 60
        lost += [max((b - a for a, b in pauses if b > when and a < until), default=0.0) - usual]
    lost.sort()
    views = {view for parts in commits.values() for _, view, _ in parts}
    print(f"{steps} steps in {len(views)} views, {len(kills)} kills; a step takes {usual * 1e3:.1f} ms")
    if lost:
        print(f"time lost by a kill: median {lost[len(lost) // 2]:.2f} s, worst {lost[-1]:.2f} s")
    print(f"load {os.getloadavg()[0]:.0f}")
    return wrong


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.elastic", description=__doc__)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two kills, on average")
    parser.add_argument("--at-once", type=int, default=1, help="how many are killed at once")
    parser.add_argument(
        "--stop", type=float, default=0.0, help="stop for so many seconds in place of killing"
    )
    parser.add_argument("--hosts", action="store_true", help="members are on two hosts: network namespaces")
    parser.add_argument(
        "--cut",
        type=float,
        default=0.0,
        help="cut the link of two hosts for so many seconds, in place of killing",
    )
    parser.add_argument(
        "--leaks",
        action="store_true",
        help="of three members that go, two leave; the first one stays, and must keep nothing of them",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=180.0, help="seconds for all to begin, and to end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("FARCALL_TOKEN", "soak-soak-soak-soak-soak")
    folder = Path(tempfile.mkdtemp(prefix="farcall-elastic-"))
    hosts = Hosts() if options.hosts or options.cut else None
    try:
        if hosts is not None:
            hosts.set_up()
        return run(folder, options, hosts)
    finally:
        if hosts is not None:
            hosts.tear_down()


def run(folder: Path, options: argparse.Namespace, hosts: Hosts | None) -> int:
    """Run the job on these hosts, or on this one; returns the exit status."""
    if hosts is not None:
        enter(hosts.names[0])
    addresses = ["127.0.0.1"] if hosts is None else hosts.addresses
    store = TCPStore(addresses[0], 0, is_master=True, wait_for_workers=False)
    network: dict[str, Any] = {"init_method": f"tcp://{addresses[0]}:{store.port}"}
    if options.cut:
        network |= {"lost_after": _CUT_LOST_AFTER, "reconnect_within": _CUT_LOST_AFTER}

    def program(name: str, host: int) -> None:
        if hosts is not None:
            enter(hosts.names[host])
            network["listen"] = addresses[host]
        be_member(name, folder, options, network)

    members = Members(folder, program)
    for index in range(options.members):
        members.add(index % len(addresses))
    limit = time.monotonic() + options.patience
    while len({name for name, entry in entries(folder) if entry["what"] == "commit"}) < options.members:
        members.collect()
        if time.monotonic() > limit or members.statuses:
            print(f"not all members have begun: {folder}", members.statuses)
            return 1
        time.sleep(0.05)
    kills = disturb(members, folder, options, hosts)
    limit = time.monotonic() + options.patience
    if options.leaks:
        (folder / "count").touch()
        while (folder / "count").exists() and time.monotonic() < limit:
            time.sleep(0.02)
    (folder / "stop").touch()
    while members.living and time.monotonic() < limit:
        members.collect()
        time.sleep(0.02)
    wrong = report(folder, members, kills)
    if options.leaks:
        wrong += growth(entries(folder))
    for each in wrong[:10]:
        print("WRONG:", each)
    print(f"logs: {folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
