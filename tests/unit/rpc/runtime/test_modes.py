"""Modes of a thread are put aside, restored and reset, all of them, and nothing else changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch

from rpc.runtime.modes import SavedModes, copy_of_modes, modes_changed, reset_modes, with_default_modes
from tests.support.modes import DEFAULTS, LEAVERS, look

OF_CONTEXTS = ("user", "decimal", "numpy")


def modes() -> dict[str, Any]:
    """What ``look`` sees, less what a context has."""
    return {name: seen for name, seen in look().items() if name not in OF_CONTEXTS}


CLEAN = {name: seen for name, seen in DEFAULTS.items() if name not in OF_CONTEXTS}


def on_a_new_thread(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(copy_context().run, function).result()


@pytest.mark.parametrize("leave", LEAVERS.values(), ids=LEAVERS)
def test_a_mode_is_put_aside_copied_and_reset_and_comes_back(leave: Callable[[], object]) -> None:
    def body() -> None:
        leave()
        left = modes()
        assert modes_changed()
        assert left != CLEAN
        assert with_default_modes(lambda: (modes(), LEAVERS["all"]())[0]) == CLEAN
        assert modes() == left, "the thread of a function keeps its own"
        copied = copy_of_modes()
        assert modes() == left
        saved = SavedModes()
        assert modes() == CLEAN
        LEAVERS["all"]()
        saved.restore()
        assert modes() == left, "they replace whatever is in force"
        reset_modes()
        assert modes() == CLEAN
        assert (torch.ones(2, requires_grad=True) * 2).requires_grad
        assert copied is not None
        copied.restore()
        assert modes() == left

    on_a_new_thread(body)


def test_saved_modes_that_are_never_restored_change_no_thread() -> None:
    saved: list[SavedModes] = []

    def put_aside() -> None:
        LEAVERS["inference_mode"]()
        saved.append(SavedModes())

    def body() -> None:
        with torch.no_grad():
            before = modes()
            saved.clear()
            gc.collect()
            assert modes() == before

    on_a_new_thread(put_aside)
    on_a_new_thread(body)


def test_modes_that_were_left_are_not_in_force_where_their_block_ends_later() -> None:
    def body() -> None:
        block = torch.inference_mode()
        block.__enter__()
        saved = SavedModes()
        with torch.no_grad():
            pass
        assert modes() == CLEAN
        saved.restore()
        block.__exit__(None, None, None)
        assert modes() == CLEAN

    on_a_new_thread(body)


def test_autocast_casts_the_weights_of_today_after_a_block_ended_on_another_thread() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    block: Any = torch.autocast("cpu")

    def begin() -> None:
        block.__enter__()
        reset_modes()

    def end() -> None:
        block.__exit__(None, None, None)
        assert modes_changed()
        reset_modes()
        for weight in (1.0, 2.0):
            with torch.no_grad():
                layer.weight.fill_(weight)
            with torch.autocast("cpu"):
                assert layer(torch.ones(1, 2)).tolist() == [[2 * weight] * 2]

    on_a_new_thread(begin)
    on_a_new_thread(end)
