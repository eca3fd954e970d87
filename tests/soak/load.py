"""The load of one worker of the soak test of failures: calls, references, backwards, collectives."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
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
from tests.support.workers import Worker

WORKERS: Final = 8
"""Number of workers."""

STAYERS: Final = 4
"""Number of workers that are neither killed nor stopped for long: the first ones."""

LOST_AFTER: Final = 6.0
"""The option ``lost_after`` of all workers, in seconds."""

QUIET_SECONDS: Final = 90.0
"""Timeout in seconds for what is in progress to end once the load is over."""

LARGE_SECONDS: Final = 0.2
"""Seconds between two large calls of a worker."""


# ---- functions that workers call


class Ledger:
    """Deposits that others have made at this worker, each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: defaultdict[int, set[int]] = defaultdict(set)
        self._ended: defaultdict[int, int] = defaultdict(int)
        self.totals: Counter[int] = Counter()
        self.doubles = 0

    def deposit(self, caller: int, number: int, ended: int, amount: int) -> int:
        """Add an amount. All calls of this caller with a number below ``ended`` have ended."""
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
    """Join, run under load, and report the results."""
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
    """Report, and leave; later interrupts are ignored."""
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
    """Carry out the orders of the driver, on a thread of its own."""
    while True:
        order, argument = worker.wait_for("order")
        match order:
            case "cut":
                with contextlib.suppress(RpcError):
                    cut(argument)
            case "reset":
                with contextlib.suppress(RpcError):
                    reset(argument)
            case "trim":
                ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
                worker.report("trimmed")
            case "stop":
                load.over.set()
            case "account":
                worker.report("account", (ledger.totals, ledger.doubles, wait_until_quiet()))
            case "leave":
                reported.set()
                return


def wait_until_quiet() -> dict[str, int]:
    """Wait until nothing is left over, at most ``QUIET_SECONDS``; returns what is still there."""
    end = time.monotonic() + QUIET_SECONDS
    while (left := left_over()) and time.monotonic() < end:
        time.sleep(0.1)
    return left
