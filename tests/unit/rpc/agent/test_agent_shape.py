"""Names that an agent had earlier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rpc.agent.agent import Agent
from rpc.options import AgentOptions


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent(AgentOptions(), "127.0.0.1")
    yield made
    made.close("the test is over")


def test_earlier_names_lead_to_what_they_named(agent: Agent) -> None:
    with pytest.warns(DeprecationWarning, match=r"use agent\.messages\.bulk"):
        assert agent.bulk is agent.messages.bulk  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="use agent.calls.answers.reply"):
        assert agent.reply == agent.calls.answers.reply  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'repyl'"):
        _ = agent.repyl  # type: ignore[attr-defined]
