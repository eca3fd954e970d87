#!/usr/bin/env python3
"""An agent that learns to balance poles from observers that act on its instructions.

Three processes on this machine, started by the command itself::

    python examples/reinforcement.py

How it works. Each of two observers simulates carts with a pole on top. At each moment it asks the agent, on
the third worker, which way to push each cart. The agent's policy is a small network. Once all poles have
fallen, or have stood for 200 steps, the agent learns from what both observers saw, and the next round
begins. (It learns by REINFORCE: Williams, Machine Learning 8, 1992. A push is made more probable by as much
as the poles stood longer after it than they did on average at that moment.)

Calls go in both directions here, through remote references, marked (1) to (3) below: the agent makes the
observers and tells them to play; each observer, while it plays, calls the agent back many times a second.
"""

from __future__ import annotations

import argparse
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.examples import Miss, example_parser, live_progress, positive, print_figures, rate, run_example

LONGEST = 200
"""Steps after which a pole counts as balanced."""
TARGET = 180.0
"""Mean steps that the poles must stand to count as success; at first it is about 20."""


# ---------------------------------------------------------------- the world: plain PyTorch


class CartPoles:
    """Carts on a track, each with a pole hinged on it, all simulated at once.

    As described by Barto, Sutton and Anderson, IEEE Transactions on Systems, Man, and Cybernetics 13, 1983:
    a cart of 1 kg, a pole of 0.1 kg and 1 m, steps of 0.02 s, pushes of 10 N to the left or right. A pole
    has fallen when it leans by more than 12 degrees, or its cart is more than 2.4 m from the middle.
    """

    GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._random = torch.Generator().manual_seed(seed)

    def begin(self) -> Tensor:
        """Sets all upright, nearly; the states: place, speed, angle and its speed, of shape (count, 4)."""
        self._state = (torch.rand(self._count, 4, generator=self._random) - 0.5) * 0.1
        return self._state

    def step(self, pushes: Tensor) -> tuple[Tensor, Tensor]:
        """Pushes each cart, left (0) or right (1).

        Returns:
            The new states, and which poles stand, of shape (count,).
        """
        _, speed, angle, turning = self._state.unbind(1)
        force = (pushes * 2 - 1) * self.FORCE
        total = self.CART + self.POLE
        pressed = (force + self.POLE * self.HALF_LENGTH * turning**2 * angle.sin()) / total
        lever = self.HALF_LENGTH * (4 / 3 - self.POLE * angle.cos() ** 2 / total)
        falling = (self.GRAVITY * angle.sin() - angle.cos() * pressed) / lever
        gaining = pressed - self.POLE * self.HALF_LENGTH * falling * angle.cos() / total
        change = torch.stack([speed, gaining, turning, falling], 1)
        self._state = self._state + self.SECONDS * change
        stands = (self._state[:, 0].abs() < 2.4) & (self._state[:, 2].abs() < math.radians(12))
        return self._state, stands


# ---------------------------------------------------------------- what lives on each observer


class Observer:
    """Has carts of its own, and does with them what the agent says."""

    def __init__(self, index: int, carts: int, seed: int) -> None:
        self._index = index
        self._carts = carts
        self._world = CartPoles(carts, seed + index)

    def play(self, agent: rpc.RRef[Agent]) -> Tensor:
        """Plays until all poles have fallen; for how many steps each stood, of shape (carts,)."""
        states = self._world.begin()
        standing = torch.ones(self._carts, dtype=torch.bool)
        steps = torch.zeros(self._carts)
        while standing.any() and steps.max() < LONGEST:
            # (1) The observer does not have the agent, only a reference to it. This calls its method on the
            # worker where it lives.
            pushes = agent.rpc_sync().decide(self._index, states)
            steps += standing
            states, stand = self._world.step(pushes)
            standing &= stand
        return steps


# ---------------------------------------------------------------- what lives on the agent


class Seen(NamedTuple):
    """An observer's observations at one moment, of shape (carts, 4), and the agent's pushes, (carts,)."""

    states: Tensor
    pushes: Tensor


class Agent:
    """Owns the policy. Observers call it, both at once: each call runs on a thread of its own."""

    def __init__(self, observers: int, learning_rate: float) -> None:
        self._policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self._optimizer = torch.optim.Adam(self._policy.parameters(), learning_rate)
        self._seen: list[list[Seen]] = [[] for _ in range(observers)]
        self._lock = threading.Lock()
        self.decisions = 0

    def decide(self, observer: int, states: Tensor) -> Tensor:
        """Which way to push each cart: 0 or 1, of shape (carts,)."""
        with torch.no_grad():
            pushes = torch.multinomial(self._policy(states).softmax(1), 1).squeeze(1)
        with self._lock:
            self._seen[observer].append(Seen(states, pushes))
            self.decisions += len(pushes)
        return pushes

    def learn(self, steps: list[Tensor]) -> None:
        """Improves the policy by a round.

        Args:
            steps: for each observer, how many steps each of its poles stood.
        """
        states = torch.cat([_padded([moment.states for moment in seen]) for seen in self._seen], 1)
        pushes = torch.cat([_padded([moment.pushes for moment in seen]) for seen in self._seen], 1)
        stood = torch.cat(steps)
        left = stood - torch.arange(LONGEST).unsqueeze(1)  # steps that a pole went on to stand
        stands = left > 0
        usual = (left * stands).sum(1) / stands.sum(1).clamp(min=1)
        better = torch.where(stands, left - usual.unsqueeze(1), 0.0)
        better /= better[stands].std() + 1e-6
        chosen = self._policy(states).log_softmax(2).gather(2, pushes.unsqueeze(2)).squeeze(2)
        self._optimizer.zero_grad()
        (-(chosen * better)[stands].mean()).backward()
        self._optimizer.step()
        for seen in self._seen:
            seen.clear()


def _padded(moments: list[Tensor]) -> Tensor:
    """Moments along a first dimension that has room for the longest round."""
    together = torch.stack(moments)
    return torch.cat([together, together.new_zeros(LONGEST - len(together), *together.shape[1:])])


# ---------------------------------------------------------------- the workers


def direct(options: argparse.Namespace) -> None:
    """The part of rank 0, which is the agent: makes the observers, has them play, learns."""
    names = NAMES[1:]
    local = Agent(len(names), options.learning_rate)
    agent = rpc.RRef(local)
    # (2) The observers are made where they are to play.
    observers = [
        rpc.remote(name, Observer, args=(index, options.carts, options.seed))
        for index, name in enumerate(names)
    ]
    mean = 0.0
    with live_progress("rounds", options.rounds, plain=options.plain) as progress:
        for played in range(1, options.rounds + 1):
            # (3) Both play at the same time: rpc_async returns futures at once. The agent goes with the
            # call, as a reference.
            games = [observer.rpc_async().play(agent) for observer in observers]
            steps = torch.futures.wait_all(games)
            now = float(torch.cat(steps).mean())
            mean = now if played == 1 else 0.7 * mean + 0.3 * now
            progress.advance(f"poles stand for {mean:.0f} steps")
            if mean >= TARGET:
                progress.finish()
                break
            local.learn(steps)
    print_figures(
        {
            "poles stand for": f"{mean:.0f} of {LONGEST} steps",
            "rounds": str(played),
            "decisions": f"{local.decisions:,}",
        }
    )
    if mean < TARGET:
        raise Miss(f"The poles stand for {mean:.0f} steps; it should be {TARGET:.0f} at least.")


NAMES = ("agent", "observer0", "observer1")


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = example_parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=150, help="at most (%(default)s)")
    parser.add_argument("--carts", type=positive, default=16, help="of each observer (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.02, help="of Adam (%(default)s)")
    run_example(parser, NAMES, direct)


if __name__ == "__main__":
    main()
