"""Weight stores in a group: shardings, versions, deaths, and what is refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rpc
from farcall.weights import Block, Store, WeightsError
from farcall.weights import handle as handle_module
from farcall.weights import keeper as keeper_module
from farcall.weights import memory as memory_module
from farcall.weights.memory import open_segment
from farcall.weights.node import node_of
from farcall.weights.versions import Who
from rpc.errors import NoMemoryError
from rpc.runtime.current import current_agent
from tests.support.process_groups import process_group
from tests.support.weights import SHAPE, be_on, empty, holds, rows, same, whole
from tests.support.workers import RunWorkers, Worker

# ---- one process


def test_a_version_is_read_in_another_sharding(store: Store) -> None:
    assert store.put(1, rows(1, 0), part=(0, 2)) is False
    assert store.versions() == []
    assert store.put(1, rows(1, 1), part=(1, 2)) is True
    columns = empty()[:, :3]
    assert store.get({"w": Block(columns, (0, 4), SHAPE)}) == 1
    assert same(columns, whole(1)[:, 4:7])
    into = empty().t().contiguous().t()
    assert store.get({"w": into}, version=1) == 1
    assert same(into, whole(1))


def test_types_and_shapes_of_all_kinds(store: Store) -> None:
    state = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "steps": torch.tensor(7),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "eighth": torch.randn(5).to(torch.float8_e4m3fn),
        "columns": torch.arange(12.0).view(3, 4).t(),
        "parameter": nn.Parameter(torch.randn(2)),
        "": torch.ones(1, 1, 1, 1),
    }
    assert store.put(-4, state)
    into = {name: torch.empty_like(value) for name, value in state.items()}
    assert store.get(into) == -4
    for name, value in state.items():
        assert torch.equal(into[name].to(torch.complex128), value.to(torch.complex128)), name


def test_newest_and_newer(store: Store) -> None:
    into = {"w": empty()}
    with pytest.raises(
        TimeoutError, match="store 'policy' on worker 'worker0' had no version within 0 s: it has none"
    ):
        store.get(into, timeout=0)
    for number in (5, 6, 3):
        store.put(number, {"w": whole(number)})
    assert store.versions() == [6, 3]
    assert store.get(into) == 3
    assert store.get(into, newer_than=6) == 3
    assert same(into["w"], whole(3))
    with pytest.raises(TimeoutError, match="no version newer than 3 within"):
        store.get(into, newer_than=3, timeout=0.01)
    with pytest.raises(TimeoutError, match="no version newer than 9 within"):
        store.get(into, newer_than=9, timeout=0)  # a number that never was is compared as a number
    with pytest.raises(TimeoutError, match="no version 9 within"):
        store.get(into, version=9, timeout=0.01)
    with pytest.raises(WeightsError, match=r"has version 5 no longer: it keeps the newest 2"):
        store.get(into, version=5)
    store.drop(3)
    assert store.get(into) == 6


def test_a_number_that_is_put_again_is_newer(store: Store) -> None:
    into = {"w": empty()}
    for leased in (False, True):
        store.put(10, {"w": whole(1)})
        if leased:
            with store.lease() as lease:
                assert lease.version == 10
        else:
            store.get(into)
        store.drop(10)
        store.put(10, {"w": whole(2)})
        assert store.get(into, newer_than=10, timeout=0) == 10
        assert same(into["w"], whole(2))
        with pytest.raises(TimeoutError, match="no version newer than 10"):
            store.get(into, newer_than=10, timeout=0)
        with pytest.raises(TimeoutError, match="no version newer than 10"):
            Store("policy", on="worker0").get(into, newer_than=10, timeout=0)
        store.drop(10)


def test_what_does_not_fit_changes_nothing(store: Store) -> None:
    store.put(1, {"w": whole(1), "b": torch.ones(2)})
    before = empty()
    for into, reason in (
        ({"w": before}, "the caller has no tensor 'b'"),
        ({"w": before, "b": torch.ones(3)}, r"its 'b' is float32\[2\], and that of the caller float32\[3\]"),
        (
            {"w": before, "b": torch.ones(2).double()},
            r"its 'b' is float32\[2\], and that of the caller float64\[2\]",
        ),
        ({"w": before, "b": torch.ones(2), "c": torch.ones(1)}, "it has no tensor 'c'"),
    ):
        with pytest.raises(WeightsError, match=f"version 1 of store 'policy' does not fit: {reason}"):
            store.get(into)
    with pytest.raises(WeightsError, match="'b' cannot be written to"):
        store.get({"w": before, "b": torch.ones(1).expand(2)})
    assert same(before, empty())
    assert store.usage()["leases"] == 0


def test_parts_that_do_not_fit_leave_the_version_open(store: Store) -> None:
    store.put(1, rows(1, 0), part=(0, 2))
    for state, part, reason in (
        ({"w": Block(whole(1)[2:], (2, 0), SHAPE)}, (1, 2), "blocks of 'w' overlap"),
        ({"w": Block(whole(1)[4:], (4, 0), SHAPE)}, (1, 2), "only 50 of the 60 elements of 'w'"),
        ({"w": Block(whole(1)[3:], (3, 0), (7, 10))}, (1, 2), "'w' is bfloat16"),
        ({"w": Block(whole(1)[3:].float(), (3, 0), SHAPE)}, (1, 2), "'w' is bfloat16"),
        ({"w": Block(whole(1)[:2], (0, 0), SHAPE)}, (0, 2), "other blocks of 'w'"),
        (rows(1, 1), (1, 3), "it has 2 parts, and not 3"),
    ):
        with pytest.raises(WeightsError, match=f"version 1 of store 'policy': .*{reason}"):
            store.put(1, state, part=part)
    assert store.usage()["open"] == {1: "part 1 of 2 is missing"}
    assert store.put(1, rows(1, 0), part=(0, 2)) is False, "a part that is given twice does no harm"
    assert store.put(1, rows(1, 1), part=(1, 2)) is True
    assert store.put(1, rows(1, 0), part=(0, 2)) is True
    assert holds(store, 1)


def test_a_version_does_not_change(store: Store) -> None:
    store.put(1, {"w": whole(1)})
    assert store.put(1, {"w": whole(1)}) is True
    with pytest.raises(WeightsError, match=r"version 1 .* is whole already, with other values of 'w'"):
        store.put(1, {"w": whole(2)})
    store.drop(1)
    store.put(1, {"w": whole(2)})
    into = empty()
    assert store.get({"w": into}) == 1
    assert same(into, whole(2))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda store: store.put(1.5, {}), "a version's number is an int, not 1.5"),
        (lambda store: store.put(True, {}), "a version's number is an int, not True"),
        (lambda store: store.put(1 << 64, {}), "64 bits at most"),
        (lambda store: store.put(1, {"step": 3}), "'step' is int"),
        (lambda store: store.put(1, {"w": empty()}, part=3), r"part is \(index, count\), not 3"),
        (lambda store: store.put(1, {"w": empty()}, part=(2, 2)), "0 <= index < count"),
        (lambda store: store.put(1, {"w": empty()}, part=(0, 10**12)), "count is at most 65536"),
        (lambda store: store.get({}, version=1, newer_than=2), "not both"),
        (lambda store: store.drop(1), "has no version 1"),
        (lambda store: Store("policy", on="worker0", keep=0), "keep is a number of versions"),
        (lambda store: Store("", on="worker0"), "name is a text"),
        (lambda store: Store("policy", on="worker0", copies=3), "copies is 1 or 2, not 3"),
    ],
)
def test_wrong_arguments(store: Store, call: Callable[[Store], object], reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        call(store)


def test_without_memory_earlier_versions_stay(store: Store) -> None:
    store.put(1, {"w": whole(1)})
    huge = {"w": Block(torch.zeros(1, 1), (0, 0), (1 << 30, 1 << 25))}
    with pytest.raises(NoMemoryError, match="no memory for part 0 of version 2 of store 'policy'"):
        store.put(2, huge, part=(0, 2))
    assert store.versions() == [1]
    assert store.usage()["open"] == {}
    store.put(2, {"w": whole(2)})


def test_one_copy_in_place_of_two_is_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    alone = Store("alone", on="worker0", copies=2)
    assert alone.put(1, {"w": whole(1)}) is True
    assert alone.put(2, {"w": whole(2)}) is True
    (told,) = [each.message for each in caplog.records if "one copy" in each.message]
    assert told == (
        "version 1 of store 'alone' has one copy, and was to have two: no other worker has opened the store "
        "with copies=2"
    )
    assert alone.usage()["copies"] == 1


def test_memory_is_bounded_and_used_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []

    def open_and_count(process: int, descriptor: int, *which: Any) -> int:
        mapped.append(descriptor)
        return open_segment(process, descriptor, *which)

    monkeypatch.setattr(handle_module, "open_segment", open_and_count)
    into = {"w": empty()}
    sizes = set()
    for number in range(8):
        store.put(number, {"w": whole(number)})
        store.get(into)
        sizes.add(store.usage()["bytes"])
    assert max(sizes) == 3 * 128
    assert len(mapped) == 6, "each of three segments is mapped once for writing and once for reading"


def test_memory_that_cannot_be_mapped_for_lack_of_descriptors_is_mapped_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    into = {"w": empty()}
    with monkeypatch.context() as patch:
        patch.setattr(handle_module, "open_segment", refuse)
        store.put(1, {"w": whole(1)})
        store.get(into)
        with store.lease() as lease:
            assert same(lease["w"], whole(1))
    assert same(into["w"], whole(1))
    sent = store.usage()["sent_bytes"]
    assert sent == 2 * 120
    assert store._handle._copy is None, "no copy has been made on the store's own host"
    store.get(into)
    assert store.usage()["sent_bytes"] == sent


def test_without_memory_for_a_copy_versions_are_read_directly(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(1, {"w": whole(1)})
    monkeypatch.setattr(handle_module, "host_identity", lambda: "another host")
    far = Store("policy", on="worker0")

    def refuse(*_: object) -> None:
        raise NoMemoryError("this host has none")

    monkeypatch.setattr(memory_module, "Segment", refuse)
    assert holds(far, 1)
    with far.lease() as lease:
        assert same(lease["w"], whole(1))
    assert store.usage()["leases"] == 0
    assert holds(store, 1)


def test_tensors_of_a_lease_are_the_readers_own(store: Store) -> None:
    store.put(1, {"w": whole(1)})
    with store.lease() as old, store.lease(1) as other:
        assert (old.version, list(old), len(old)) == (1, ["w"], 1)
        assert old["w"] is old["w"]
        old["w"].zero_()
        assert same(other["w"], whole(1))
        kept = other["w"]
        with pytest.raises(KeyError):
            old["v"]
        store.put(2, {"w": whole(2)})
        store.put(3, {"w": whole(3)})
        assert store.versions() == [2, 3]
        assert store.usage()["leases"] == 2
    with pytest.raises(WeightsError, match="inside its with statement only"):
        old["w"]
    for number in range(4, 9):
        store.put(number, {"w": whole(number)})
    assert same(kept, whole(1)), "a tensor that outlives its lease stays as it is"
    assert store.usage()["bytes"] <= 3 * 128


def test_tensors_of_a_lease_have_memory_whatever_the_default_device(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in calls here, as between containers that share no memory."""
    store.put(1, {"w": whole(1)})
    monkeypatch.setattr(handle_module.Handle, "view", lambda *_: None)
    with torch.device("meta"), store.lease() as mine:
        read = mine["w"]
    assert same(read, whole(1))


@pytest.mark.parametrize("ended", [False, True])
def test_a_lost_writer_changes_no_whole_version(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """If its process lives, all parts have to be put again; if it has ended, its part only."""
    monkeypatch.setattr(keeper_module, "has_ended", lambda process: ended and process == 4711)
    keeper = node_of(cast("Any", current_agent())).stores["worker0", "policy"]
    assert store.put(1, rows(1, 0), part=(0, 2)) is False
    boxes = [["w", "bfloat16", list(SHAPE), [[[3, 0], [3, 10]]]]]
    keeper.begin(1, [1, 2], boxes, ["stopped", 1, 4711], insist=False)
    known = keeper._tensor(keeper._catalogue.open[1], "w")
    keeper._lose((Who("stopped", 1), "it does not answer"))
    assert ("all parts have to be put again" in store.usage()["open"][1]) is not ended
    assert store.put(1, rows(1, 1), part=(1, 2)) is ended
    if not ended:
        known.zero_()
        assert store.put(1, rows(1, 0), part=(0, 2)) is True
    assert holds(store, 1)
    assert store.usage()["bytes"] == 128


def test_a_version_is_whole_once_both_puts_of_a_handle_have_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins while the first one writes; it fails the first time."""
    write, ended = handle_module.Handle._write, list[bool]()

    def fail(*_: Any) -> None:
        monkeypatch.setattr(handle_module.Handle, "_write", write)
        raise NoMemoryError("none")

    def write_and_put(self: Any, *args: Any) -> None:
        monkeypatch.setattr(handle_module.Handle, "_write", fail)
        with pytest.raises(NoMemoryError):
            store.put(1, {"w": whole(1)})
        ended.append(store.put(1, {"w": whole(1)}))
        write(self, *args)

    monkeypatch.setattr(handle_module.Handle, "_write", write_and_put)
    assert store.put(1, {"w": whole(1)}) is True
    assert ended == [False]
    assert store.versions() == [1]


# ---- several workers


def publish(worker: Worker, numbers: int, *, far: bool = False) -> None:
    if far:
        be_on("another host")
    with worker.group():
        store = Store("policy", on="worker0")
        for number in range(numbers):
            store.put(number, rows(number, worker.rank), part=(worker.rank, 2))
        worker.wait_for("end")


def follow(worker: Worker, last: int, *, far: bool = False) -> list[int]:
    if far:
        be_on("another host")
    with worker.group():
        store = Store("policy", on="worker0")
        columns = empty()[:, :5]
        into = {"w": Block(columns, (0, 5), SHAPE)}
        seen = [store.get(into)]
        while seen[-1] != last:
            assert same(columns, whole(seen[-1])[:, 5:])
            seen.append(store.get(into, newer_than=seen[-1]))
        assert same(columns, whole(last)[:, 5:])
        with store.lease(last) as mine:
            assert same(mine["w"], whole(last))
            mine["w"].zero_()
        worker.report("done", store.usage())
        worker.wait_for("end")
        return seen


@pytest.mark.parametrize("far", [False, True])
def test_readers_follow_two_writers(run_workers: RunWorkers, *, far: bool) -> None:
    writers = [partial(publish, numbers=20), partial(publish, numbers=20, far=far)]
    workers = run_workers.start([*writers, *[partial(follow, last=19, far=far)] * 2], 4)
    for rank in (2, 3):
        usage = workers[rank].wait_for("done")
        assert (usage["sent_bytes"] > 0, usage["received_bytes"] > 0) == (far, far)
    workers.tell("end")
    for seen in workers.results()[2:]:
        assert seen == sorted(set(seen))


def test_large_tensors_go_to_other_hosts_in_blocks(run_workers: RunWorkers) -> None:
    assert run_workers(exchange_large, 2)[1] == (True, True)


def exchange_large(worker: Worker) -> tuple[bool, bool] | None:
    if worker.rank:
        be_on("another host")
    with worker.group():
        store = Store("policy", on="worker0")
        large = torch.arange(5_000_000, dtype=torch.int32).view(2, -1)
        if not worker.rank:
            return None
        store.put(1, {"w": large.t()})
        into = torch.zeros_like(large.t())
        store.get({"w": into})
        return torch.equal(into, large.t()), store.usage()["sent_bytes"] == large.nbytes


def read_far(worker: Worker) -> list[int]:
    """Read three versions, at the pace of the test; returns what the store has sent after each."""
    be_on("another host")
    with worker.group():
        store = Store("policy", on="worker0")
        into = {"w": torch.zeros(1000, 1000)}
        sent = []
        for number in (1, 2, 3):
            worker.wait_for("read")
            assert store.get(into, version=number) == number
            assert torch.equal(into["w"], large(number))
            with store.lease(number) as leased:
                assert torch.equal(leased["w"], large(number))
                leased["w"].zero_()
            assert store.get(into) == number
            assert torch.equal(into["w"], large(number))
            worker.report("has read")
            worker.wait_for("look")
            sent.append(store.usage()["sent_bytes"])
            worker.report("has looked")
        return sent


def large(number: int) -> torch.Tensor:
    """A version; the second differs from the first in 2 % of the elements, the third in all."""
    tensor = torch.arange(1_000_000.0)
    if number == 2:
        tensor[::50] += 0.5
    return (tensor + (number == 3)).view(1000, 1000)


def publish_large(worker: Worker) -> None:
    with worker.group():
        store = Store("policy", on="worker0")
        for number in (1, 2, 3):
            worker.wait_for("put")
            store.put(number, {"w": large(number)})
            worker.report("has put")


def test_a_host_fetches_a_version_once_and_then_what_has_changed(run_workers: RunWorkers) -> None:
    workers = run_workers.start([publish_large, read_far, read_far], 3)
    for _ in range(3):
        workers[0].tell("put")
        workers[0].wait_for("has put")
        for event, answer in (("read", "has read"), ("look", "has looked")):
            for reader in (workers[1], workers[2]):
                reader.tell(event)
            for reader in (workers[1], workers[2]):
                reader.wait_for(answer)
    for first, second, third in workers.results()[1:]:
        assert first == 4_000_000
        assert second - first < 0.05 * 4_000_000
        assert third - second == 4_000_000


def put_at_once(worker: Worker) -> bool:
    """Several workers put the same part of each version, as data-parallel ranks do."""
    with worker.group():
        store = Store("policy", on="worker0")
        for number in range(10):
            store.put(number, {"w": whole(number)})
            rpc.barrier()  # as the collectives of a step keep the ranks together
        return holds(store, 9)


def test_workers_may_put_the_same_part(run_workers: RunWorkers) -> None:
    assert run_workers(put_at_once, 3) == [True] * 3


def shard(worker: Worker) -> list[bool]:
    """Put a model that is sharded by FSDP2 over tensor parallelism; read it in other shardings."""
    with worker.group(), process_group(worker, backend="gloo"):
        store = Store("policy", on="worker0")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.LayerNorm(5))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        store.put(1, model.state_dict(), part=(worker.rank, 4))
        plain = {name: torch.zeros_like(value) for name, value in expected.items()}
        store.get(plain)
        equal = [torch.equal(plain[name], value) for name, value in expected.items()]
        for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(-1)]):
            into = {
                name: distribute_tensor(torch.zeros_like(value), mesh, placements[: value.dim() + 1])
                for name, value in expected.items()
            }
            assert store.get(into) == 1
            equal += [torch.equal(into[name].full_tensor(), value) for name, value in expected.items()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        store.get(model.state_dict(), version=1)
        for name, value in model.state_dict().items():
            equal.append(torch.equal(cast("DTensor", value).full_tensor(), expected[name]))
        store.put(2, {"w": distribute_tensor(torch.arange(7.0), mesh, [Shard(0), Replicate()])})
        seven = torch.zeros(7)
        store.get({"w": seven}, version=2, timeout=20)
        return [*equal, torch.equal(seven, torch.arange(7.0))]


def test_sharded_models_are_read_in_any_sharding(run_workers: RunWorkers) -> None:
    for equal in run_workers(shard, 4):
        assert all(equal)


def test_no_pickles_are_needed(run_workers: RunWorkers) -> None:
    def main(worker: Worker) -> int:
        with worker.group(deserialization="safe"):
            store = Store("policy", on="worker0")
            store.put(1, rows(1, worker.rank), part=(worker.rank, 2))
            with pytest.raises(WeightsError, match="has no version 7"):
                store.drop(7)
            return store.get({"w": empty()}, timeout=20)

    assert run_workers(main, 2) == [1, 1]
