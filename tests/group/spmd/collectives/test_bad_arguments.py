"""What cannot be right is refused on the rank that has it, before anybody is told, and the group goes on.

Each message says the operation, the rank, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import rpc
import spmd
from spmd.tensor_parallel import ColwiseParallel, PrepareModuleInput, SequenceParallel, parallelize_module
from tests.group.spmd.meshes import in_mesh
from tests.support.default_device import MODE, TYPE
from tests.support.process_groups import process_group
from tests.support.serving import in_processes, in_worker0
from tests.support.workers import Worker

THREE: Final = torch.ones(3)
NOWHERE: Final = torch.empty(3, device="meta")
SPREAD: Final = torch.ones(1).expand(3)
OP: Final = dist.ReduceOp
HALF: Final = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
TWO: Final = [THREE, THREE]


def as_list(*tensors: Any) -> list[Any]:
    return list(tensors)


def on(group: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """An operation of the group itself, where c10d's functions look first."""
    return getattr(group, name)(*arguments, type("Options", (), {"asyncOp": False, **options})())


PLACES = f"on the CPU or '{TYPE}'" if MODE else "on the CPU"
DEVICE = f"takes dense tensors {PLACES}, got float32[3], torch.strided, on meta"
WRONG: Final[dict[str, tuple[Callable[[Any], Any], type[Exception], str]]] = {
    # tensors that are elsewhere
    "all_reduce elsewhere": (
        lambda _: dist.all_reduce(NOWHERE),
        ValueError,
        f"all_reduce(sum, float32[3]) at rank 1: process group '0' {DEVICE}",
    ),
    "gather elsewhere": (lambda _: dist.gather(NOWHERE, dst=0), ValueError, DEVICE),
    "reduce_scatter_tensor elsewhere": (
        lambda _: dist.reduce_scatter_tensor(THREE, torch.empty(6, device="meta")),
        ValueError,
        f"reduce_scatter_single at rank 1: process group '0' takes dense tensors {PLACES}, got float32[6]",
    ),
    "send elsewhere": (
        lambda _: dist.send(NOWHERE, 0),
        ValueError,
        f"send at rank 1: process group '0' {DEVICE}",
    ),
    "receive elsewhere": (
        lambda _: dist.recv(NOWHERE, 0),
        ValueError,
        "receive at rank 1: process group '0'",
    ),
    # tensors of other kinds
    "broadcast of a sparse tensor": (
        lambda _: dist.broadcast(THREE.to_sparse(), 0),
        ValueError,
        f"at rank 1: process group '0' takes dense tensors {PLACES}, got float32[3], torch.sparse_coo",
    ),
    "all_reduce of sparse rows": (
        lambda _: dist.all_reduce(torch.eye(3, device="cpu").to_sparse_csr()),
        ValueError,
        "torch.sparse_csr, on cpu",
    ),
    "all_reduce of an expanded tensor": (
        lambda _: dist.all_reduce(SPREAD),
        ValueError,
        "at rank 1: expected a tensor that can be written, got float32[3], several of whose elements",
    ),
    # reductions
    "a bitwise reduction of numbers": (
        lambda _: dist.all_reduce(THREE, OP.BAND),
        TypeError,
        "all_reduce at rank 1: tensors of torch.float32 cannot be reduced by bitwise and",
    ),
    "a coalesced one": (
        lambda group: on(group, "allreduce_coalesced", [THREE, THREE.int()], reduceOp=OP.BOR),
        TypeError,
        "all_reduce_coalesced at rank 1: tensors of torch.float32 cannot be reduced by bitwise or",
    ),
    "an average of booleans": (
        lambda _: dist.all_reduce(THREE.bool(), OP.AVG),
        TypeError,
        "all_reduce at rank 1: tensors of torch.bool cannot be reduced by average",
    ),
    "a scaled sum of whole numbers": (
        lambda _: dist.reduce_scatter(THREE.int(), [THREE.int()] * 2, HALF),
        TypeError,
        "reduce_scatter at rank 1: tensors of torch.int32 cannot be reduced by scaled sum by 0.5",
    ),
    "an unknown reduction": (
        lambda group: on(group, "allreduce", [THREE], reduceOp="median"),
        ValueError,
        "all_reduce at rank 1: expected a reduction (sum, average, product, minimum, maximum, bitwise and, ",
    ),
    "another reduction of a sparse tensor": (
        lambda _: dist.all_reduce(THREE.to_sparse(), OP.MAX),
        ValueError,
        "all_reduce at rank 1: sparse tensors can be reduced by sum, not by maximum",
    ),
    # sizes and numbers
    "too few outputs": (
        lambda _: dist.all_gather([THREE], THREE),
        ValueError,
        "all_gather at rank 1: there must be one output for each of 2 ranks, got 1",
    ),
    "an output that is too small": (
        lambda _: dist.all_gather_into_tensor(torch.empty(5), THREE),
        ValueError,
        "2 times as many elements as the input, of its dtype; got float32[5] for float32[3]",
    ),
    "an input that is too small": (
        lambda _: dist.reduce_scatter_tensor(torch.empty(5), THREE),
        ValueError,
        "reduce_scatter at rank 1: the input must have 2 times as many elements as the output",
    ),
    "splits that do not add up": (
        lambda _: dist.all_to_all_single(torch.empty(3), THREE, [1, 1], [1, 2]),
        ValueError,
        "all_to_all_single at rank 1: the output's 3 rows cannot be split into [1, 1] for 2 ranks",
    ),
    "splits below 0": (
        lambda _: dist.all_to_all_single(torch.empty(3), THREE, [1, 2], [-1, 4]),
        ValueError,
        "all_to_all_single at rank 1: the input's 3 rows cannot be split into [-1, 4] for 2 ranks",
    ),
    "several tensors": (
        lambda group: on(group, "allreduce", TWO, reduceOp=OP.SUM),
        ValueError,
        "all_reduce at rank 1: a rank has one tensor, got 2",
    ),
    # ranks and times
    "a root that is no rank": (
        lambda _: dist.broadcast(THREE, 5),
        ValueError,
        "broadcast at rank 1: there is no rank 5 in a group of 2",
    ),
    "a receiver that is no rank": (
        lambda _: dist.send(THREE, 5),
        ValueError,
        "rank 1 cannot send to rank 5 in a group of 2",
    ),
    "a time that is none": (
        lambda group: group.set_timeout(3.0),
        TypeError,
        "expected a timedelta for a timeout, got 3.0",
    ),
    "a time of a monitored barrier that is none": (
        lambda group: group.monitored_barrier(3.0),
        TypeError,
        "expected a timedelta for a timeout, got 3.0",
    ),
    "a time below 0": (
        lambda group: group.set_timeout(timedelta(seconds=-3)),
        ValueError,
        "set_timeout at rank 1: expected a timeout of 0 s, which is none, or more, got -3 s",
    ),
    "a new group's time below 0": (
        lambda _: dist.new_group(
            [1], timedelta(seconds=-3), backend="farcall", use_local_synchronization=True
        ),
        ValueError,
        "at rank 0: expected a timeout of 0 s, which is none, or more, got -3 s",
    ),
    "a wait's time that is none": (
        lambda _: cast("Any", dist.isend(THREE[:0], 0)).wait(3),
        TypeError,
        "tag 0: expected a timedelta for a timeout, got 3",
    ),
    # dtypes, lists and tags
    "all_to_all of several dtypes": (
        lambda group: on(group, "alltoall", TWO, [THREE, THREE.int()]),
        ValueError,
        "all_to_all at rank 1: expected inputs and outputs of one dtype, got float32[3] and int32[3]",
    ),
    "all_gather of several dtypes": (
        lambda group: on(group, "allgather", [[THREE, THREE.int()]], [THREE]),
        ValueError,
        "all_gather at rank 1: expected inputs and outputs of one dtype, got float32[3] and int32[3]",
    ),
    "reduce_scatter of several dtypes": (
        lambda group: on(group, "reduce_scatter", [THREE], [[THREE, THREE.int()]], reduceOp=OP.SUM),
        ValueError,
        "reduce_scatter at rank 1: expected inputs and outputs of one dtype, got float32[3] and int32[3]",
    ),
    "all_to_all_single of several dtypes": (
        lambda group: on(group, "all_to_all_single", THREE[:2].int(), THREE[:2], [], []),
        ValueError,
        "all_to_all_single at rank 1: expected inputs and outputs of one dtype, got float32[2] and int32[2]",
    ),
    "fewer outputs than inputs": (
        lambda group: on(group, "all_gather_single_coalesced", [torch.empty(6)], TWO),
        ValueError,
        "all_gather at rank 1: expected one output for each input, got 1 outputs and 2 inputs",
    ),
    "more inputs than outputs": (
        lambda group: on(group, "reduce_scatter_single_coalesced", [THREE], [torch.ones(6)] * 2),
        ValueError,
        "reduce_scatter at rank 1: expected one output for each input, got 2 inputs and 1 outputs",
    ),
    "a tag that is none": (
        lambda group: group.send([THREE], 0, "x"),
        TypeError,
        "send at rank 1: expected a whole number of 64 bits for a tag, got 'x'",
    ),
    "options that are none": (
        lambda _: dist.new_group([1], backend="farcall", pg_options=3, use_local_synchronization=True),
        rpc.errors.InvalidOptionError,
        "backend 'farcall' takes rpc.AgentOptions for pg_options, not int",
    ),
}


@in_processes(2)
def test_what_cannot_be_right_is_refused_and_the_group_goes_on(worker: Worker) -> None:
    with process_group(worker) as group:
        if worker.rank == 1:
            for name, (call, kind, text) in WRONG.items():
                with pytest.raises(kind) as caught:
                    call(group)
                assert text in str(caught.value), name
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3


@in_processes(3)
def test_ranks_outside_of_a_sub_group_are_told_which_group(worker: Worker) -> None:
    with process_group(worker):
        pair = dist.new_group([0, 1])
        if worker.rank == 2:
            with pytest.warns(UserWarning, match="global rank 2 which does not belong to the given group"):
                dist.all_reduce(torch.ones(3), group=pair)
        else:
            with pytest.raises(ValueError, match=r"rank 2 is not part of group process group '1' of 2 ranks"):
                dist.broadcast(torch.ones(3), 2, group=pair)
        dist.barrier()


@in_worker0(1)
def test_the_time_of_a_process_group_of_workers_is_a_timedelta(worker: Worker) -> None:
    seconds: Any = 3
    with pytest.raises(TypeError, match="rank 0: expected a timedelta for timeout, got 3"):
        spmd.init_process_group(seconds)
    spmd.init_process_group(timedelta(seconds=3))
    dist.destroy_process_group()


# ---- tensor parallelism, beside test_tensor_parallel_plans.py


def no_such_dimensions(mesh: DeviceMesh) -> None:
    where = rf"rank {dist.get_rank()}, module "
    x = torch.ones(2, 4)
    there = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(3), use_local_output=True
    )
    back = PrepareModuleInput(
        input_layouts=Shard(3), desired_input_layouts=Replicate(), use_local_output=True
    )
    for module, style, kind in (
        (nn.Identity(), there, "Identity: expected a tensor"),
        (nn.Identity(), back, "Identity: expected a tensor"),
        (nn.Linear(4, 4), ColwiseParallel(input_layouts=Shard(3)), "Linear: expected the input"),
        (nn.Linear(4, 4), ColwiseParallel(output_layouts=Shard(-3)), "Linear: expected a tensor"),
        (nn.LayerNorm(4), SequenceParallel(sequence_dim=3), "LayerNorm: expected the input"),
    ):
        parallelize_module(module, mesh, style)
        with pytest.raises(ValueError, match=rf"{where}{kind} to have a dimension for .*3.*, got 2 of them"):
            module(x)


def no_such_source(mesh: DeviceMesh) -> None:
    sources: list[Any] = [2, "0", -1]
    for source in sources:
        with pytest.raises(ValueError, match="src_data_rank to be None or a rank of the mesh, 0 to 1, got"):
            parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel(), src_data_rank=source)


def other_places(mesh: DeviceMesh) -> None:
    for module, x in (
        (nn.Linear(4, 4, device="meta"), torch.ones(2, 4)),
        (nn.Embedding(4, 4, device="meta"), torch.tensor([1])),
        (nn.Linear(4, 4), torch.ones(2, 4, device="meta")),
    ):
        parallelize_module(module, mesh, ColwiseParallel())
        with pytest.raises(
            ValueError, match=r"rank \d, module \w+: expected the input where the weight is, on"
        ):
            module(x)
    wrong: Any = "model"
    with pytest.raises(TypeError, match=r"expected module to be a torch\.nn\.Module, got str"):
        spmd.explain(wrong)


@in_mesh(2)
def test_parallel_modules_say_what_they_cannot_take(mesh: DeviceMesh) -> None:
    no_such_dimensions(mesh)
    no_such_source(mesh)
    other_places(mesh)
