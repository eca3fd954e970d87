"""Kill the workers of replicated objects at random moments, and check that no update is lost or doubled.

python -m tests.soak.replicated --kills 20
python -m tests.soak.replicated --kills 20 --backups      # of any copy, not always of the one that answers

Four workers keep two copies of a server and of a module; each that is killed is replaced. Trainers push
updates, and one steps a DistributedOptimizer of the module. In the end each update must have been used once,
the server's random numbers must be those of one process, and so must the module's weights (1e-9, in
float64).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from farcall import elastic
from rpc.errors import WorkerLostError
from tests.soak.processes import Processes

__all__ = ["main"]

torch.optim.SGD([nn.Parameter(torch.zeros(()))], 0.1)  # imports what the first optimizer needs

_SERVERS: Final = 4
_TRAINERS: Final = 3
_PATIENCE: Final = 90.0


class Server:
    """Notes each update, in their order, and draws a random number for each."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int]] = []
        self.random = torch.Generator().manual_seed(1)
        self.total = torch.zeros(4, dtype=torch.float64)

    def push(self, trainer: int, number: int, gradient: torch.Tensor) -> int:
        self.updates.append((trainer, number))
        self.total += gradient * torch.rand(4, dtype=torch.float64, generator=self.random)
        return len(self.updates)

    def look(self) -> tuple[list[tuple[int, int]], torch.Tensor]:
        return self.updates, self.total


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def gradient_of(trainer: int, number: int) -> torch.Tensor:
    return torch.full((4,), trainer + number / 1000, dtype=torch.float64)


def wait_for(path: Path, patience: float = _PATIENCE) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path.name)
        time.sleep(0.02)


def write(path: Path, value: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


def serve(name: str, folder: Path) -> None:
    """Keep copies until the end."""
    elastic.Replicated(Server, name="server")
    elastic.Replicated(make_model, name="model")
    write(folder / f"{name}.json", "serves")
    wait_for(folder / "end", 1e9)


def push(number: int, folder: Path) -> None:
    """Push updates until the parent has killed enough."""
    server = elastic.Replicated.find("server", timeout=_PATIENCE)
    count, longest = 0, 0.0
    while not (folder / "stop").exists():
        began = time.monotonic()
        server.rpc_sync().push(number, count, gradient_of(number, count))
        longest = max(longest, time.monotonic() - began)
        count += 1
    write(folder / f"pushed{number}.json", [count, longest])
    wait_for(folder / "end")


def train(folder: Path) -> None:
    """Step the module's optimizer, and tell the parent who has copies; in the end, what the objects have."""
    server = elastic.Replicated.find("server", timeout=_PATIENCE)
    model = elastic.Replicated.find("model", timeout=_PATIENCE)
    optimizer = DistributedOptimizer(optim.Adam, model.remote_parameters(), lr=0.01)
    step = repeated = 0
    while not (folder / "stop").exists():
        write(folder / "copies.json", [server.workers(), model.workers()])
        x, y = batch(step)
        try:
            with dist_autograd.context() as context_id:
                loss = nn.functional.mse_loss(model.rpc_sync().forward(x), y)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        except WorkerLostError:  # the gradients are lost, and the step was not taken
            repeated += 1
            continue
        step += 1
    for number in range(_TRAINERS):
        wait_for(folder / f"pushed{number}.json")
    torch.save([step, repeated, *server.rpc_sync().look(), model.rpc_sync().state_dict()], folder / "all.pt")
    (folder / "saved").touch()
    wait_for(folder / "end")


class Workers(Processes):
    """The workers of the group."""

    def add(self, name: str, program: Callable[..., None], *args: Any) -> None:
        """Start a worker."""

        def run() -> None:
            meeting = (self.folder / "meeting").as_uri()
            rpc.init_rpc(name, rpc_backend_options=rpc.AgentOptions(init_method=meeting, dynamic=True))
            program(*args)
            rpc.shutdown()

        self.start(name, run)

    def kill(self, name: str) -> None:
        pid = self.living.pop(name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def errors(self) -> list[str]:
        """What is said of those that have ended by themselves."""
        self.collect()
        return [f"{name}: {(self.folder / f'{name}.err').read_text()[-2000:]}" for name in self.statuses]


def next_victim(folder: Path, processes: Workers, backups: bool) -> str:
    """Wait until both objects have two copies on living workers; return one of the workers."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError):
            server, model = json.loads((folder / "copies.json").read_text())
            if len(server) == len(model) == 2 and {*server, *model} <= processes.living.keys():
                return str(
                    random.choice([*server, *model]) if backups else random.choice([server[0], model[0]])
                )
        if ended := processes.errors():
            raise AssertionError("\n".join(ended))
        time.sleep(0.02)
    raise AssertionError(f"there are no two copies: {(folder / 'copies.json').read_text()}")


def check(folder: Path, kills: int) -> bool:
    """Whether each update was used once. Prints the figures."""
    step, repeated, updates, total, weights = torch.load(folder / "all.pt", weights_only=False)
    pushed = [json.loads((folder / f"pushed{number}.json").read_text()) for number in range(_TRAINERS)]
    whole = all(
        [number for trainer, number in updates if trainer == each] == list(range(count))
        for each, (count, _) in enumerate(pushed)
    )
    alone = Server()
    for trainer, number in updates:
        alone.push(trainer, number, gradient_of(trainer, number))
    model = make_model()
    adam = optim.Adam(model.parameters(), lr=0.01)
    for each in range(step):
        x, y = batch(each)
        adam.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        adam.step()
    error = max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items())
    print(f"{kills} kills, {len(updates)} updates, each used once: {whole}")
    print(f"random numbers as in one process: {torch.equal(alone.total, total)}")
    print(
        f"{step} steps of the optimizer ({repeated} repeated); largest difference to one process: {error:.1e}"
    )
    print(f"longest call: {max(longest for _, longest in pushed):.2f} s")
    return whole and torch.equal(alone.total, total) and error < 1e-9


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--backups", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where logs stay")
    options = parser.parse_args()
    random.seed(options.seed)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="replicated-"))
        )
        folder.mkdir(exist_ok=True)
        processes = Workers(folder)
        count = _SERVERS
        for number in range(_SERVERS):
            processes.add(f"server{number}", serve, f"server{number}", folder)
        for number in range(_TRAINERS):
            processes.add(f"trainer{number}", push, number, folder)
        processes.add("optimizing", train, folder)
        for _ in range(options.kills):
            victim = next_victim(folder, processes, options.backups)
            time.sleep(random.random() * 0.2)
            processes.kill(victim)
            print(f"killed {victim}", flush=True)
            processes.add(f"server{count}", serve, f"server{count}", folder)
            count += 1
        next_victim(folder, processes, options.backups)
        (folder / "stop").touch()
        wait_for(folder / "saved")
        for name in processes.living:  # the last ones that were started have found the objects, too
            if name.startswith("server"):
                wait_for(folder / f"{name}.json")
        (folder / "end").touch()
        good = check(folder, options.kills)
        for name, pid in list(processes.living.items()):
            _, status = os.waitpid(pid, 0)
            if status:
                good = False
                print(f"{name}: {(folder / f'{name}.err').read_text()[-2000:]}")
    sys.exit(0 if good else "an update was lost or doubled, or a worker has failed")


if __name__ == "__main__":
    main()
