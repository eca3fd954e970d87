"""Private names of PyTorch: what happens if the installed version does not have one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rpc.errors import MissingInternalError
from rpc.runtime.internals import Internals
from tests.support.fresh import RunFresh

NEVER = (99, 0)


def test_a_missing_name_is_replaced() -> None:
    assert Internals().find("torch._C:_no_such_name", "nothing works", instead=7) == 7
    assert Internals().find("torch._no_such_module:name", "nothing works", instead=7) == 7


def test_the_use_of_a_missing_name_says_what_does_not_work() -> None:
    found = Internals().find("torch._C:_no_such_name", "sums do not work")
    for use in (found, lambda: found.attribute, type("Derived", (found,), {})):
        with pytest.raises(MissingInternalError, match=r"torch\._C\._no_such_name: sums do not work"):
            use()


def test_missing_names_are_logged_once_by_what_does_not_work(caplog: pytest.LogCaptureFixture) -> None:
    internals = Internals()
    internals.find("torch._C:_first", "sums do not work")
    internals.expect("torch:Tensor._second", without="products do not work")
    internals.find("torch._C:_third", "sums do not work")
    internals.find("torch:add", "nothing works")
    with caplog.at_level(logging.WARNING):
        internals.check()
        internals.check()
    assert [record.getMessage().partition("does not have ")[2] for record in caplog.records] == [
        "torch._C._first, torch._C._third: sums do not work",
        "torch.Tensor._second: products do not work",
    ]
    assert internals.is_missing("sums do not work")
    assert not internals.is_missing("nothing works")
    with pytest.raises(MissingInternalError, match="sums do not work"):
        internals.require("sums do not work")
    internals.require("nothing works")


def test_a_name_that_this_version_does_not_need_is_not_missed() -> None:
    internals = Internals()
    internals.find("torch._C:_no_such_name", "nothing works", since=NEVER)
    assert internals.find("torch:add", "nothing works", until=(1, 0), instead=None) is None
    assert not internals.missing


def test_a_name_for_later_is_looked_up_when_it_is_needed() -> None:
    internals = Internals()
    look_up = internals.later("torch:add", "nothing works")
    missing = internals.later("torch:_no_such_name", "nothing works", instead=None)
    assert [each.name for each in internals.names] == ["torch:add", "torch:_no_such_name"]
    assert not internals.missing
    assert look_up() is torch.add
    assert missing() is missing() is None
    assert len(internals.missing) == 1


WITHOUT = """
import sys, torch

del torch._C._len_torch_dispatch_stack, torch._neg_view, torch._C._storage_Use_Count
import dist_autograd
import rpc
from rpc import errors

rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.AgentOptions(init_method=sys.argv[1]))
assert rpc.rpc_sync("alone", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
assert rpc.remote("alone", torch.add, args=(torch.ones(2), 1)).to_here().tolist() == [2, 2]
negative = torch.complex(torch.ones(2), torch.ones(2)).conj().imag
for use in (lambda: rpc.rpc_sync("alone", torch.add, args=(negative, 1)), dist_autograd.context().__enter__):
    try:
        use()
    except Exception as error:
        missing = str(error).partition("does not have ")[2].partition(". ")[0]
        print(type(error) is errors.MissingInternalError, missing)
rpc.shutdown()
"""


@pytest.mark.processes
def test_a_version_without_some_names_says_so_and_the_rest_works(tmp_path: Path, run_fresh: RunFresh) -> None:
    done = run_fresh(WITHOUT, f"file://{tmp_path}/meeting")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "does not have" in line]
    assert [line.partition("does not have ")[2] for line in lines] == [
        (
            "torch._C._len_torch_dispatch_stack: "
            "modes of PyTorch that a function leaves set stay set on its thread"
        ),
        "torch._neg_view: tensors whose negative bit is set cannot be sent to other workers",
        "torch._C._storage_Use_Count: distributed autograd does not work",
    ]
    assert done.stdout.splitlines() == [
        "True torch._neg_view: tensors whose negative bit is set cannot be sent to other workers",
        "True torch._C._storage_Use_Count: distributed autograd does not work",
    ]
