"""The current agent: there is one, and it goes when it is meant, not in place of its successor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rpc.errors import AlreadyInitializedError
from rpc.runtime.current import clear_current_agent, current_agent, is_initialized, set_current_agent


class Agent:
    """An agent, as far as this module looks at it."""


@pytest.fixture
def agent() -> Iterator[Agent]:
    """The current agent."""
    made = Agent()
    set_current_agent(made)
    yield made
    clear_current_agent(made)


def test_an_agent_is_current_until_it_is_cleared(agent: Agent) -> None:
    assert current_agent() is agent
    with pytest.raises(AlreadyInitializedError):
        set_current_agent(Agent())
    clear_current_agent(agent)
    assert not is_initialized()


def test_who_clears_an_earlier_agent_leaves_the_current_one(agent: Agent) -> None:
    clear_current_agent(Agent())
    assert current_agent() is agent
