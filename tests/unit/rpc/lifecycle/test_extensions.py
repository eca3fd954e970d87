"""Extensions of an agent: packages name their extension as an entry point, and each new agent gets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import rpc
from rpc.lifecycle.own_backend import EXTENSIONS
from rpc.runtime.current import current_agent

MODULE = """
def install(agent):
    agent.extensions["counting"] = Counting(agent)


class Counting:
    def __init__(self, agent):
        self.joined = not hasattr(agent, "info")

    def debug_info(self):
        return {"installed_before_joining": self.joined}
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with an extension."""
    (tmp_path / "counting_extension.py").write_text(MODULE)
    described = tmp_path / "counting_extension-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-extension\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{EXTENSIONS}]\ncounting = counting_extension:install\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("distribution")
def test_an_agent_gets_the_extensions_of_all_installed_packages_before_it_joins() -> None:
    for _ in range(2):  # the next agent gets its own
        rpc.init_with_store(None, HashStore(), "alone", 0, 1)
        try:
            info = rpc.get_debug_info()
            ours = {"rref", "names", "autograd", "profiling", "spmd.store", "observe", "counters"}
            assert set(current_agent().extensions) == {*ours, "counting"}
        finally:
            rpc.shutdown()
        assert info["installed_before_joining"]
        assert info["num_owner_rrefs"] == 0
        assert info["num_autograd_contexts"] == 0
