"""Eight workers under load, while they are killed, stopped and interrupted and cut off, all at once.

::

    python -m tests.soak.failures --minutes 10
    python -m tests.soak.failures --minutes 10 --tcp       # as between hosts: connections are reset, too

Each worker calls the others, passes references round and runs backwards; the first four are ranks of a
process group as well, and run collectives. The last four are killed now and then, or stopped for longer than
``lost_after``, and others started under their names. Checked are: nothing is run twice; sums of what was
called for lie between what surely ran and that with what may have; gradients and collectives are exact; when
the load ends, no call is pending, and nothing is left over; the first four, which live through it all, have
no more descriptors, segments, threads or memory. With ``--tcp`` there is no shared memory, and large tensors
travel over bulk streams, to calls and in collectives. It prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is documented there

import dist_autograd
import rpc
from rpc.errors import RpcError
from rpc.runtime.current import current_agent
from rpc.runtime.interrupts import interruptible, protected
from tests.soak.interrupts import left_over
from tests.support.cutting import cut, reset
from tests.support.fork_server import ForkServer
from tests.support.workers import RunWorkers, Worker, WorkerProcess, Workers, WorkersFailed, worker_main

WORKERS: Final = 8
STAYERS: Final = 4
LOST_AFTER: Final = 6.0
BRIEFLY: Final = 2.0
"""Seconds that any worker may be stopped for: less than ``lost_after``."""
QUIET_SECONDS: Final = 90.0
"""How long what is under way may take to end when there is no more load."""
NOTICED_SECONDS: Final = 30.0
"""Maximum time until a worker has noticed a death; a loaded machine takes longer than usual."""
LARGE_SECONDS: Final = 0.2
"""Between two large calls of a worker."""
WARM_UP: Final = 40.0
"""Seconds after which memory is taken to have been got, in which there are no faults but cuts."""


# ---- what is called


class Ledger:
    """What others have had this worker do, each of it once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: defaultdict[int, set[int]] = defaultdict(set)
        self._ended: defaultdict[int, int] = defaultdict(int)
        self.totals: Counter[int] = Counter()
        self.doubles = 0

    def deposit(self, caller: int, number: int, ended: int, amount: int) -> int:
        """Add an amount; ``ended``: all calls of this caller's below this number have ended."""
        with self._lock:
            seen = self._seen[caller]
            if number in seen:
                self.doubles += 1
            seen.add(number)
            if ended > self._ended[caller]:
                self._ended[caller] = ended
                self._seen[caller] = {each for each in seen if each >= ended}
            self.totals[caller] += amount
        return current_incarnation()


ledger = Ledger()


def current_incarnation() -> int:
    """Of this worker."""
    incarnation: int = current_agent().incarnation
    return incarnation


def deposit(caller: int, number: int, ended: int, amount: int) -> int:
    """To be called remotely; returns the incarnation of who has run it."""
    return ledger.deposit(caller, number, ended, amount)


def total(rref: rpc.RRef[torch.Tensor]) -> float:
    """To be called remotely, with a reference to an object of anybody's."""
    return float(rref.to_here().sum())


def check_and_double(x: torch.Tensor, first: float) -> torch.Tensor:
    """To be called remotely, with a large tensor of numbers in a row."""
    if not torch.equal(x, _in_a_row(len(x), first)):
        raise AssertionError("a tensor has not arrived as it was sent")
    return x * 2


def _in_a_row(size: int, first: float) -> torch.Tensor:
    return torch.arange(float(size)) % 1000 + first


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """To be called remotely, in a context of distributed autograd."""
    return x * factor


def times_twice(x: torch.Tensor, then: str, factor: float) -> torch.Tensor:
    """The same, over one worker more."""
    return rpc.rpc_sync(then, times, args=(x * factor, factor))


# ---- a worker


class Load:
    """What one worker does until it is told to stop, and what came of it."""

    def __init__(self, worker: Worker, *, across_hosts: bool) -> None:
        self.worker = worker
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.certain: Counter[int] = Counter()
        """By incarnation, of what has answered."""
        self.uncertain: Counter[str] = Counter()
        """By name, of what may have run."""
        self.number = 0
        self.me = current_incarnation()
        self.chance = random.Random(self.me)
        self.sizes = (1, 100, 50_000, 1 << 20, 4 << 20) if across_hosts else (1, 100, 50_000)

    def others(self) -> list[str]:
        """The workers that are present."""
        mine = rpc.get_worker_info().name
        return [info.name for info in rpc.get_worker_infos() if info.name != mine]

    def pick(self, chance: random.Random) -> tuple[str, str]:
        """Two others, which may be the same."""
        others = self.others() or [rpc.get_worker_info().name]
        return chance.choice(others), chance.choice(others)

    # on the main thread, which is interrupted

    @protected  # for Ctrl-C may come while the one before is being counted
    def call_until_over(self) -> None:
        """Calls and references."""
        while not self.over.is_set():
            try:
                self.call_some()
            except KeyboardInterrupt:
                self.errors["KeyboardInterrupt"] += 1
            except RpcError as error:
                self.errors[f"references: {type(error).__name__}"] += 1
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")

    def call_some(self) -> None:
        for to in {self.pick(self.chance)[0] for _ in range(3)}:
            first, calls = self.number, []
            for _ in range(20):
                self.number += 1
                calls.append((self.number, self.chance.randrange(1, 100)))
            self.deposit_all(to, first, calls)
        self.pass_references(*self.pick(self.chance))

    def deposit_all(self, to: str, ended: int, calls: Sequence[tuple[int, int]]) -> None:
        """Some calls at a time; what has not answered when this is left may have run."""
        left = dict(calls)
        try:
            self.wait_for_deposits(to, ended, calls, left)
        finally:
            self.uncertain[to] += sum(left.values())

    @interruptible
    def wait_for_deposits(
        self, to: str, ended: int, calls: Sequence[tuple[int, int]], left: dict[int, int]
    ) -> None:
        timeout = self.chance.choice((0, 30))
        futures = [
            (
                number,
                amount,
                rpc.rpc_async(to, deposit, args=(self.me, number, ended, amount), timeout=timeout),
            )
            for number, amount in calls
        ]
        for number, amount, future in futures:
            try:
                by = future.wait()
            except RpcError as error:
                self.errors[f"calls: {type(error).__name__}"] += 1
                continue
            self.note(number, amount, by, left)

    @protected
    def note(self, number: int, amount: int, by: int, left: dict[int, int]) -> None:
        self.certain[by] += amount
        del left[number]
        self.done["calls"] += 1

    @interruptible
    def pass_references(self, to: str, third: str) -> None:
        mine, theirs = rpc.RRef(torch.ones(3)), rpc.remote(to, torch.ones, args=(20_000,))
        sums = [rpc.rpc_async(to, total, args=(mine,)), rpc.rpc_async(third, total, args=(theirs,))]
        found = [future.wait() for future in sums]
        if found != [3.0, 20_000.0] or float(theirs.to_here()[-1]) != 1.0:
            self.wrong.append(f"references: {found}")
        self.done["references"] += 2

    # on threads of their own

    def differentiate_until_over(self) -> None:
        """Distributed autograd over two workers."""
        chance = random.Random(self.me + 1)
        while not self.over.is_set():
            try:
                x = torch.full((500,), float(chance.randrange(1, 9)), requires_grad=True)
                first, second = self.pick(chance)
                with dist_autograd.context() as context:
                    y = rpc.rpc_sync(first, times_twice, args=(x * x, second, 3.0))
                    dist_autograd.backward(context, [y.sum()])
                    gradient = dist_autograd.get_gradients(context)[x]
                if not torch.equal(gradient, 18 * x.detach()):
                    self.wrong.append(f"a gradient is {gradient[0]}, not {18 * x[0]}")
                self.done["backwards"] += 1
            except RpcError as error:
                self.errors[f"autograd: {type(error).__name__}"] += 1
            except Exception as error:
                self.wrong.append(f"autograd: {type(error).__name__}: {error}")

    def transfer_until_over(self) -> None:
        """Large tensors to calls and back."""
        chance = random.Random(self.me + 2)
        while not self.over.is_set():
            size, first = chance.choice((200_000, 1 << 20, 3 << 20)), float(chance.randrange(1000))
            try:
                sent = _in_a_row(size, first)
                doubled = rpc.rpc_sync(self.pick(chance)[0], check_and_double, args=(sent, first))
                if not torch.equal(doubled, sent * 2):
                    self.wrong.append("an answer has not arrived as it was sent")
                self.done["large calls"] += 1
            except RpcError as error:
                self.errors[f"large calls: {type(error).__name__}"] += 1
            except Exception as error:
                self.wrong.append(f"large calls: {type(error).__name__}: {error}")
            self.over.wait(LARGE_SECONDS)

    def collect_until_over(self) -> None:
        """Collectives among the first four. The first says when they end, by the value that it sends."""
        rank = self.worker.rank
        store = FileStore(str(self.worker.folder / "process-group"), STAYERS)
        try:
            dist.init_process_group(
                "farcall", store=store, rank=rank, world_size=STAYERS, timeout=timedelta(seconds=120)
            )
            goes_on = 1
            while goes_on:
                size = self.chance.choice(self.sizes) if rank == 0 else 0
                head = torch.tensor([size, not self.over.is_set()])
                dist.broadcast(head, 0)
                size, goes_on = head.tolist()
                values = torch.arange(float(size)) + rank
                dist.all_reduce(values)
                gathered = [torch.empty(2) for _ in range(STAYERS)]
                dist.all_gather(gathered, torch.full((2,), float(rank)))
                if not torch.equal(values, 4 * torch.arange(float(size)) + 6) or [
                    float(each[0]) for each in gathered
                ] != [0.0, 1.0, 2.0, 3.0]:
                    self.wrong.append("a collective is not exact")
                self.done["collectives"] += 3
            dist.destroy_process_group()
        except Exception as error:
            self.wrong.append(f"collectives: {type(error).__name__}: {error}")


def be_a_worker(worker: Worker, transports: Sequence[str] | None) -> None:
    """Join, and be under load; report what comes of it."""
    global ledger
    ledger = Ledger()
    torch.set_num_threads(1)
    rpc.on_worker_lost(lambda info, reason: worker.report("lost", (info.name, time.monotonic(), reason)))
    worker.join(
        dynamic=True,
        transports=transports,
        **({"shared_memory_bytes": 0} if transports else {}),
        lost_after=LOST_AFTER,
        reconnect_within=20.0,
        rendezvous_timeout=60.0,
    )
    load = Load(worker, across_hosts=transports is not None)
    threads = [threading.Thread(target=load.differentiate_until_over, daemon=True)]
    if transports is not None:
        threads.append(threading.Thread(target=load.transfer_until_over, daemon=True))
    if worker.rank < STAYERS and worker.name == f"worker{worker.rank}":
        threads.append(threading.Thread(target=load.collect_until_over, daemon=True))
    orders = threading.Thread(target=follow, args=(worker, load), daemon=True)
    for thread in [*threads, orders]:
        thread.start()
    worker.report("joined", load.me)
    load.call_until_over()
    finish(worker, load, threads)


@protected
def finish(worker: Worker, load: Load, threads: Iterable[threading.Thread]) -> None:
    """Report, and leave; what still interrupts is too late."""
    for thread in threads:
        thread.join(QUIET_SECONDS)
        if thread.is_alive():
            load.wrong.append(f"{thread.name} has not ended in {QUIET_SECONDS:g} s")
    result = (load.me, load.done, load.errors, load.wrong[:5], load.certain, load.uncertain)
    worker.report("stopped", result)
    reported.wait(4 * QUIET_SECONDS)
    rpc.shutdown(graceful=False)


reported = threading.Event()


def follow(worker: Worker, load: Load) -> None:
    """Do what the driver says, on a thread of its own."""
    while True:
        order, argument = worker.wait_for("order")
        match order:
            case "cut":
                with contextlib.suppress(RpcError):
                    cut(argument)
            case "reset":
                with contextlib.suppress(RpcError):
                    reset(argument)
            case "stop":
                load.over.set()
            case "account":
                worker.report("account", (ledger.totals, ledger.doubles, wait_until_quiet()))
            case "leave":
                reported.set()
                return


def wait_until_quiet() -> dict[str, int]:
    """What is still left over of all that was under way, after a while."""
    end = time.monotonic() + QUIET_SECONDS
    while (left := left_over()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


# ---- the driver


class Driver:
    """Starts workers, does them harm, and adds up."""

    def __init__(self, run_workers: RunWorkers, seed: int, minutes: float, *, tcp: bool) -> None:
        self.chance = random.Random(seed)
        self.seconds = 60 * minutes
        self.harm: Counter[str] = Counter()
        self.noticed: defaultdict[str, list[float]] = defaultdict(list)
        self.dead_since: dict[str, tuple[str, float]] = {}
        self.transports = ("tcp",) if tcp else None
        self.group: Workers = run_workers.start(
            [be_a_worker] * WORKERS, args=(self.transports,), time_limit=self.seconds + 6 * QUIET_SECONDS
        )
        self.workers: dict[str, WorkerProcess] = {each.name: each for each in self.group}
        self.incarnations = {name: each.wait_for("joined") for name, each in self.workers.items()}
        self.goers = list(self.workers)[STAYERS:]
        self.stayers = list(self.workers)[:STAYERS]
        self.reasons: Counter[str] = Counter()

    def run(self) -> None:
        """All of it but the end."""
        begun = time.monotonic()
        self.go_on_until(begun + min(WARM_UP, self.seconds / 4), [(1, self.cut)])
        self.before = self.measure()
        faults = [
            (8, self.kill),
            (3, self.stop_for_long),
            (25, self.stop_briefly),
            (34, self.cut),
            (30, self.interrupt),
        ]
        if self.transports:
            faults.append((34, self.reset))
        self.go_on_until(begun + self.seconds, faults)

    def go_on_until(self, end: float, faults: Sequence[tuple[int, Callable[[], None]]]) -> None:
        while time.monotonic() < end:
            self.pause(self.chance.uniform(0.1, 0.8))
            weights, actions = zip(*faults, strict=True)
            self.chance.choices(actions, weights)[0]()

    def pause(self, seconds: float) -> None:
        """Let time pass, and hear what workers report."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.group.pump_until(lambda: True, "")
            self.hear()
            time.sleep(0.02)

    def hear(self) -> None:
        for worker in self.workers.values():
            lost = worker._events["lost"]
            while lost:
                name, when, reason = lost.popleft()
                self.reasons[_shortened(reason)] += 1
                if name in self.dead_since:
                    how, since = self.dead_since[name]
                    self.noticed[how].append(when - since)

    # faults

    def kill(self) -> None:
        name = self.chance.choice(self.goers)
        self.dead_since[name] = ("kill -9", time.monotonic())
        self.workers[name].kill()
        self.harm["kills"] += 1
        self.replace(name)

    def stop_for_long(self) -> None:
        """Longer than ``lost_after``: the others lose it, and it has to start again."""
        name = self.chance.choice(self.goers)
        self.dead_since[name] = ("SIGSTOP", time.monotonic())
        self.workers[name].stop()
        self.pause(LOST_AFTER + 3)
        self.workers[name].kill()
        self.workers[name].resume()
        self.harm["stops for long"] += 1
        self.replace(name)

    def replace(self, name: str) -> None:
        how, _ = self.dead_since[name]
        noticed, end = len(self.noticed[how]), time.monotonic() + NOTICED_SECONDS
        self.pause(self.chance.uniform(0.5, 2.0))
        while len(self.noticed[how]) == noticed and time.monotonic() < end:  # its name is not free before
            self.pause(0.1)
        del self.dead_since[name]
        old = self.workers[name]
        new = self.group.add(
            be_a_worker, name=name, rank=old.rank, world_size=WORKERS, args=(self.transports,)
        )
        self.workers[name] = new
        self.incarnations[name] = new.wait_for("joined")
        self.harm["restarts"] += 1

    def stop_briefly(self) -> None:
        worker = self.chance.choice(list(self.workers.values()))
        worker.stop()
        self.pause(self.chance.uniform(0.1, BRIEFLY))
        worker.resume()
        self.harm["stops, brief"] += 1

    def cut(self) -> None:
        one, other = self.chance.sample(list(self.workers), 2)
        self.workers[one].tell("order", ("cut", other))
        self.harm["cuts"] += 1

    def reset(self) -> None:
        one, other = self.chance.sample(list(self.workers), 2)
        self.workers[one].tell("order", ("reset", other))
        self.harm["resets"] += 1

    def interrupt(self) -> None:
        worker = self.chance.choice(list(self.workers.values()))
        for _ in range(self.chance.randrange(1, 6)):
            worker.interrupt()
            self.harm["interrupts"] += 1
            time.sleep(self.chance.uniform(0.001, 0.02))

    # the end

    def measure(self) -> dict[str, dict[str, int]]:
        return {name: measured(self.workers[name].pid) for name in self.stayers}

    def end(self) -> list[str]:
        """Stop the load, and check everything; what is wrong."""
        wrong: list[str] = []
        self.pause(1.0)
        for worker in self.workers.values():
            worker.tell("order", ("stop", None))
        results = {name: each.wait_for("stopped") for name, each in self.workers.items()}
        self.hear()
        for worker in self.workers.values():
            worker.tell("order", ("account", None))
        accounts = {name: each.wait_for("account") for name, each in self.workers.items()}
        self.after = self.measure()
        for worker in self.workers.values():
            worker.tell("order", ("leave", None))
        self.group.results()
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        for caller, (me, done, errors, problems, certain, uncertain) in results.items():
            self.done += done
            self.errors += errors
            wrong += [f"{caller}: {problem}" for problem in problems]
            for name, (totals, _, _) in accounts.items():
                least = certain[self.incarnations[name]]
                if not least <= totals[me] <= least + uncertain[name]:
                    wrong.append(
                        f"{name} has {totals[me]} of {caller}, who knows of {least} + {uncertain[name]}"
                    )
        for name, (_, doubles, left) in accounts.items():
            if doubles:
                wrong.append(f"{name} has run {doubles} calls twice")
            if left:
                wrong.append(f"{name} has left over {left}")
        return wrong + self.leaks()

    def leaks(self) -> list[str]:
        found = []
        for name in self.stayers:
            before, after = self.before[name], self.after[name]
            if after["RSS, MiB"] > 1.3 * before["RSS, MiB"] + 20:
                found.append(f"{name} has grown: {before} to {after}")
            if after["threads"] > before["threads"] + 12:
                found.append(f"{name} has more threads: {before} to {after}")
            if (
                after["descriptors"] > before["descriptors"] + 12
                or after["segments"] > before["segments"] + 12
            ):
                found.append(f"{name} has more open: {before} to {after}")
        return found

    def table(self) -> str:
        """All that was done, by what."""
        lines = [f"{what:28} {count:8}" for what, count in (*self.harm.items(), *sorted(self.done.items()))]
        lines += ["errors, by what was done:"]
        lines += [f"  {what:40} {count:8}" for what, count in sorted(self.errors.items())]
        lines += ["workers were lost, by what is said of them:"]
        lines += [f"  {count:6}  {what}" for what, count in self.reasons.most_common(8)]
        for how, seconds in self.noticed.items():
            lines.append(
                f"{how} noticed {len(seconds)} times, after {1000 * min(seconds):.0f} / "
                f"{1000 * statistics.median(seconds):.0f} / {1000 * max(seconds):.0f} ms (min / median / max)"
            )
        for name in self.stayers:
            lines.append(f"{name}: {self.before[name]} at first, {self.after[name]} at the end")
        return "\n".join(lines)


def measured(pid: int) -> dict[str, int]:
    """Of a process: memory, descriptors, mapped segments, threads."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return {
        "RSS, MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "descriptors": len(list((proc / "fd").iterdir())),
        "segments": (proc / "maps").read_text().count("/memfd:"),
        "threads": len(list((proc / "task").iterdir())),
    }


def _shortened(reason: str) -> str:
    for words in ("since about", "it cannot be reached at", "process ("):
        reason = reason.partition(words)[0]
    return reason[:110]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.failures", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of what goes wrong when (default: 0)")
    parser.add_argument("--tcp", action="store_true", help="over TCP, and connections are reset as well")
    options = parser.parse_args(arguments)
    server = ForkServer.start(worker_main)
    try:
        with tempfile.TemporaryDirectory(prefix="failures-") as folder:
            runner = RunWorkers(server, Path(folder))
            try:
                driver = Driver(runner, options.seed, options.minutes, tcp=options.tcp)
                driver.run()
                wrong = driver.end()
                print(driver.table())
            except WorkersFailed as failure:
                wrong = [f"{each.worker} {each.reason}\n{each.details[-4000:]}" for each in failure.failures]
            with contextlib.suppress(WorkersFailed):
                runner.close()
    finally:
        server.stop()
    print(*wrong, sep="\n")
    print(f"{len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(import_module("tests.soak.failures").main())  # where workers find all of this
