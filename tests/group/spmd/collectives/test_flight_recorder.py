"""The flight recorder: what each rank called, for PyTorch's ``torchfrtrace``."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spmd
from spmd.collectives.errors import CollectiveError
from tests.support.process_groups import process_group
from tests.support.workers import RunWorkers, Worker

HAS_TOOL = torch.__version__ >= "2.15"
"""The tool of older versions knows few libraries by name."""
PREFIX = "rank_"


def entries_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    with open(folder / f"{PREFIX}{rank}", "rb") as file:
        found = pickle.load(file)["entries"]
    assert isinstance(found, list)
    return found


def analysed(folder: Path) -> Any:
    """What the tool makes of the files in a folder."""
    from torch.distributed.flight_recorder import fr_trace

    output = folder.parent / "analysed"
    fr_trace.main([str(folder), "--prefix", PREFIX, "--output", str(output)])
    with open(output, "rb") as file:
        return pickle.load(file)[1]


def call_all(worker: Worker) -> None:
    rank, size = worker.rank, worker.world_size
    folder = worker.folder / "traces"
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/{PREFIX}"
    with process_group(worker):
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 1)
        dist.all_gather([torch.empty(4) for _ in range(size)], x)
        dist.all_gather_into_tensor(torch.empty(4 * size), x)
        dist.reduce_scatter(torch.empty(4), [x] * size)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size))
        dist.all_to_all_single(torch.empty(2 * size), torch.ones(2 * size))
        dist.all_to_all([torch.empty(2) for _ in range(size)], [torch.ones(2)] * size)
        dist.gather(x, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
        dist.scatter(x, [torch.ones(4)] * size if rank == 0 else None)
        dist.barrier()
        part = dist.new_group([0, 1], group_desc="a part")
        if rank < 2:
            dist.all_reduce(x, group=part)
            if rank:
                dist.recv(x, 0)
            else:
                dist.send(x, 1)
        spmd.dump_flight_recorder(f"{folder}/{PREFIX}")


CALLED = [
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "reduce_scatter"),
    *("reduce_scatter_single", "all_to_all_single", "all_to_all", "gather", "scatter", "barrier"),
]


def test_each_operation_is_recorded_with_its_place_and_torchfrtrace_matches_them(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    run_workers(call_all, 3)
    for rank in range(3):
        entries = entries_of(tmp_path / "traces", rank)
        names = [each["profiling_name"].partition(":")[2] for each in entries]
        assert [name for name in names if "->" not in name and "<-" not in name] == [
            *CALLED,
            *(["all_reduce"] if rank < 2 else []),
        ]
        assert names[len(CALLED) + 1 :] == [["send 0->1"], ["recv 1<-0"], []][rank]
        assert {each["state"] for each in entries} == {"completed"}
        assert all(each["time_created_ns"] <= each["time_discovered_completed_ns"] for each in entries)
        assert all(any(place["name"] == "call_all" for place in each["frames"]) for each in entries)
        whole = [each for each in entries if each["process_group"][1] != "a part"]
        assert [each["collective_seq_id"] for each in whole if not each["is_p2p"]] == list(range(1, 13))
        assert entries[4]["input_sizes"] == [[4]]
        assert entries[4]["output_sizes"] == [[12]]
        assert entries[4]["input_dtypes"] == ["float32"]
    if not HAS_TOOL:
        return
    found = analysed(tmp_path / "traces")
    assert [each.collective_name for each in found.collectives if each.pass_check] == [
        *(f"c10d:{name}" for name in [*CALLED, "all_reduce"]),
        "c10d:send 0->1",
    ]
    assert sorted(each.size for each in found.groups) == [2, 3]
    assert {each.desc for each in found.groups} == {"default_pg", "a part"}


def written() -> None:
    """Wait for the thread that writes the file."""
    for thread in threading.enumerate():
        if thread.name == "farcall-flight-recorder":
            thread.join()


def call_different_things(worker: Worker) -> None:
    folder = worker.folder / "traces"
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/{PREFIX}"
    with process_group(worker), contextlib.suppress(CollectiveError):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4 + worker.rank))
    written()


def test_each_rank_of_a_group_that_failed_leaves_its_record_and_torchfrtrace_names_the_difference(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    run_workers(call_different_things, 2)
    for rank in range(2):
        done, failed = entries_of(tmp_path / "traces", rank)
        assert (done["state"], done["retired"]) == ("completed", True)
        assert failed["state"] == "started"
        assert failed["input_sizes"] == [[4 + rank]]
    if not HAS_TOOL:
        return
    found = analysed(tmp_path / "traces")
    same, different = found.collectives
    assert same.pass_check
    assert not different.pass_check
    assert different.collective_seq_id == 2


def do_not_come(worker: Worker, wanted: str) -> None:
    """Rank 0 waits in a collective until its timeout; rank 1 does not call it."""
    folder = worker.folder / "traces"
    folder.mkdir(exist_ok=True)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/{PREFIX}"
    os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = wanted
    with process_group(worker) as group, contextlib.suppress(CollectiveError):
        dist.all_reduce(torch.ones(4))
        if worker.rank == 0:
            group.set_timeout(timedelta(seconds=0.5))
            dist.all_reduce(torch.ones(4))
        else:
            dist.recv(torch.empty(1), 0)
    written()


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_a_rank_that_has_not_come_is_named_unless_the_environment_forbids_files(
    run_workers: RunWorkers, tmp_path: Path, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_workers(partial(do_not_come, wanted=wanted), 2)
    files = sorted(each.name for each in (tmp_path / "traces").iterdir())
    assert files == ([] if wanted == "0" else [f"{PREFIX}0", f"{PREFIX}1"])
    if not files or not HAS_TOOL:
        return
    with caplog.at_level("INFO"):
        analysed(tmp_path / "traces")
    said = caplog.messages
    begin = said.index("collective: c10d:all_reduce")
    assert said[begin + 1 :][:3].count("missing ranks: {1}") == 1


def leave(worker: Worker) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{worker.folder}/{PREFIX}"
    with process_group(worker):
        dist.all_reduce(torch.ones(1))


def test_a_group_that_is_destroyed_leaves_no_file(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(leave, 2)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def record_nothing(worker: Worker) -> int:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    with process_group(worker) as group:
        dist.all_reduce(torch.ones(1))
        path = spmd.dump_flight_recorder(f"{worker.folder}/{PREFIX}")
        assert group is not None
    return len(entries_of(Path(path).parent, worker.rank))


def test_it_can_be_turned_off(run_workers: RunWorkers) -> None:
    assert run_workers(record_nothing, 2) == [0, 0]


def test_without_a_group_of_ours_there_is_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default process group of the backend 'farcall'"):
        spmd.dump_flight_recorder(f"{tmp_path}/{PREFIX}")
