"""The agent composes parts: few attributes, no copies of its parts' methods, and nobody writes into it; other
packages are given ports.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rpc.agent.agent import Agent
from rpc.options import AgentOptions
from tests.support.syntax_trees import syntax_trees, tree_of

__all__ = ["syntax_trees"]

pytestmark = pytest.mark.usefixtures("syntax_trees")

ROOT = Path(__file__).resolve().parents[4]

PACKAGES = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")

MAX_ATTRIBUTES = 20

METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType, partial)

ABOVE_WITH_AGENT = {
    "dist_autograd/installation.py",
    "rref/installation.py",
    "spmd/collectives/node.py",
    "spmd/collectives/store.py",
}
"""Files of packages above ``rpc`` that take an agent apart: they compose what is given ports."""

PORTS = ("rpc/agent/ports.py", "rref/ports.py", "dist_autograd/ports.py")

PARTS = {
    "Agent",
    "AnswerSender",
    "Caller",
    "CallTable",
    "Connections",
    "Control",
    "Dispatcher",
    "PeerTable",
    "ReceivedRequests",
    "RequestRunner",
}
"""Parts of an agent that no port may hand on."""


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent(AgentOptions(), "127.0.0.1")
    yield made
    made.close("the test is over")


def trees(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), tree_of(path)


def test_an_agent_has_few_attributes(agent: Agent) -> None:
    assert len(vars(agent).keys() | Agent.__annotations__.keys()) <= MAX_ATTRIBUTES


def test_no_attribute_is_a_method_of_a_part(agent: Agent) -> None:
    assert not [name for name, value in vars(agent).items() if isinstance(value, METHODS)]
    for face in (agent.calls, agent.messages):
        held = {each.name: getattr(face, each.name) for each in dataclasses.fields(face)}
        assert not [name for name, value in held.items() if isinstance(value, METHODS)]
    for public in (vars(agent.group), vars(agent.lifecycle)):
        shown = {name: value for name, value in public.items() if not name.startswith("_")}
        assert not [name for name, value in shown.items() if isinstance(value, METHODS)]


def test_earlier_names_lead_to_what_they_named(agent: Agent) -> None:
    with pytest.warns(DeprecationWarning, match=r"use agent\.messages\.bulk"):
        assert agent.bulk is agent.messages.bulk  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="use agent.calls.answers.reply"):
        assert agent.reply == agent.calls.answers.reply  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'repyl'"):
        _ = agent.repyl  # type: ignore[attr-defined]


def test_nobody_writes_into_an_agent() -> None:
    agents = re.compile(r"(.*\.)?_?agent(\(\))?(\..+)?")
    assert not [
        f"{path}:{node.lineno} {ast.unparse(target)}"
        for path, tree in trees(*PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and agents.fullmatch(ast.unparse(target.value))
        if ast.unparse(target) != "_agent().rpc_timeout"  # of the interface that every backend has
    ]


def test_packages_above_are_given_ports_and_not_the_agent() -> None:
    takes = {
        path
        for path, tree in trees("rref", "dist_autograd", "dist_optim", "spmd")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "rpc.agent.agent"
        if any(alias.name == "Agent" for alias in node.names)
    }
    assert takes == ABOVE_WITH_AGENT


@pytest.mark.parametrize("path", PORTS)
def test_ports_name_methods_and_no_parts(path: str) -> None:
    tree = tree_of(ROOT / path)
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not imported & PARTS
