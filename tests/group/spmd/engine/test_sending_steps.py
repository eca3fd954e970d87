"""What it costs to send a step of SPMD mode to one worker more."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any, Final

import torch

import spmd
from spmd.engine.driver import start
from tests.support.serving import in_standing_group

_FUNCTIONS: Final = 25
"""Maximum number of Python functions that are entered to send a step to a further worker."""


@in_standing_group(4)
def test_a_step_without_uploads_is_sent_to_a_further_worker_in_few_functions() -> None:
    spmd.use_spmd()
    x = torch.ones(3).to(spmd.device())
    mode: Any = start._current()
    recorder = mode.session.recorder
    for _ in range(3):  # the program is known, and the connections are warm
        y = x + 1
        spmd.sync()
    y = x + 1
    entered: list[str] = []
    before = sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        recorder.flush()
    finally:
        sys.setprofile(before)
    begins = [place for place, each in enumerate(entered) if each == "RemoteWorker.send"]
    counts = [end - begin for begin, end in itertools.pairwise(begins[1:])]
    assert len(begins) == len(mode.ports) > 2
    assert all(each <= _FUNCTIONS for each in counts), entered[begins[1] : begins[2]]
    assert y.tolist() == [2.0] * 3
    spmd.shutdown()
