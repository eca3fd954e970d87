"""Each dtype in each collective, by each reduction: it works, or is refused on the calling rank and the group
goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

from tests.support.default_device import not_on_devices
from tests.support.process_groups import by_messages, process_group
from tests.support.workers import RunWorkers, Worker

pytestmark = pytest.mark.processes

DTYPES: Final = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
OP: Final = dist.ReduceOp
TWICE: Final = dist._make_nccl_premul_sum(2.0)  # type: ignore[attr-defined]
REDUCTIONS: Final[dict[str, Any]] = {
    **{name: getattr(OP, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")},
    "PREMUL_SUM": TWICE,
}
OF_INTEGERS: Final = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"}
OF_FLOATS: Final = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"}
KNOWN: Final = {
    torch.int64: OF_INTEGERS,
    torch.uint8: OF_INTEGERS,
    torch.bool: OF_INTEGERS - {"AVG"},
    torch.float32: OF_FLOATS,
    torch.bfloat16: OF_FLOATS,
    torch.complex64: {"SUM", "AVG", "PREMUL_SUM"},  # c10d itself refuses the product
    torch.uint32: {"PRODUCT", "BAND", "BOR", "BXOR"}
    | ({"MIN", "MAX"} if torch.__version__ >= "2.15" else set()),
    torch.float8_e5m2: set[str](),
}
"""The reductions of some dtypes. Others may change with PyTorch."""


def made(dtype: torch.dtype, count: int, step: int = 1) -> torch.Tensor:
    """A tensor of any dtype, also of one that PyTorch cannot fill."""
    return torch.ones(count * step * max(1, dtype.itemsize), dtype=torch.uint8).view(dtype)[::step]


def reductions(dtype: torch.dtype, size: int, step: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each collective that reduces, by each reduction."""
    one, whole = partial(made, dtype, 4, step), partial(made, dtype, 4 * size, step)
    for name, op in REDUCTIONS.items():
        yield f"all_reduce {name}", lambda op=op: dist.all_reduce(one(), op)  # type: ignore[misc]
        yield f"reduce {name}", lambda op=op: dist.reduce(one(), 0, op)  # type: ignore[misc]
        yield (
            f"reduce_scatter {name}",
            lambda op=op: dist.reduce_scatter(one(), [one()] * size, op),  # type: ignore[misc]
        )
        yield (
            f"reduce_scatter_tensor {name}",
            lambda op=op: dist.reduce_scatter_tensor(one(), whole(), op),  # type: ignore[misc]
        )
        yield (
            f"all_reduce_coalesced {name}",
            lambda op=op: dist.all_reduce_coalesced([one(), one()], op),  # type: ignore[misc]
        )


def moves(dtype: torch.dtype, size: int, step: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each collective that does not reduce."""
    one, whole = partial(made, dtype, 4, step), partial(made, dtype, 4 * size, step)
    is_root = dist.get_rank() == 0

    def several() -> list[torch.Tensor]:
        return [one() for _ in range(size)]

    def around() -> None:
        target = one()
        sent = dist.isend(one(), (dist.get_rank() + 1) % size)
        dist.recv(target, (dist.get_rank() - 1) % size)
        assert sent is not None
        sent.wait()

    yield "broadcast", lambda: dist.broadcast(one(), 0)
    yield "all_gather", lambda: dist.all_gather(several(), one())
    yield "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(whole(), one())
    yield "gather", lambda: dist.gather(one(), several() if is_root else None, 0)
    yield "scatter", lambda: dist.scatter(one(), several() if is_root else None, 0)
    yield "all_to_all", lambda: dist.all_to_all(several(), several())
    yield "all_to_all_single", lambda: dist.all_to_all_single(whole(), whole())
    yield "send and recv", around


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError):
        dist.barrier()  # the group goes on
        return "refused"
    return "done"


def all_of_them(apart: bool, worker: Worker) -> dict[str, str]:
    warnings.simplefilter("ignore")  # of c10d's older names
    with process_group(worker, options=by_messages() if apart else None):
        size = worker.world_size
        said = {
            f"{dtype} {step} {name}": outcome(call)
            for dtype in DTYPES
            for step, calls in ((1, reductions), (1, moves), (2, moves))
            for name, call in calls(dtype, size, step)
        }
        dist.barrier()
        return said


@pytest.mark.parametrize(
    "apart", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["shared memory", "messages"]
)
def test_each_dtype_works_or_is_refused_before_the_other_ranks_hear_of_it(
    run_workers: RunWorkers, apart: bool
) -> None:
    first, *others = run_workers(partial(all_of_them, apart), 3, time_limit=60)
    assert all(each == first for each in others)
    for dtype, possible in KNOWN.items():
        assert {name for name in REDUCTIONS if first[f"{dtype} 1 all_reduce {name}"] == "done"} == possible
        assert first[f"{dtype} 2 all_to_all"] == "done"
    assert all(
        said == "done" for name, said in first.items() if " 1 " in name and name.endswith("all_to_all")
    )


def negative_view(apart: bool, worker: Worker) -> None:
    with process_group(worker, options=by_messages() if apart else None):
        size, negative = worker.world_size, torch.tensor([1 + 2j, 3 - 4j]).conj().imag
        assert negative.is_neg()  # its memory has the negatives of its elements
        parts = [torch.zeros_like(negative) for _ in range(size)]
        dist.all_gather(parts, negative)
        assert all(torch.equal(part, negative) for part in parts)
        total = negative.clone() * size
        dist.all_reduce(negative)
        assert torch.equal(negative, total)


@not_on_devices("the simulated device has no lazy negatives")
@pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "messages"])
def test_a_negative_view_has_its_own_elements(run_workers: RunWorkers, apart: bool) -> None:
    run_workers(partial(negative_view, apart), 3)


def factor(worker: Worker) -> float:
    with process_group(worker, options=by_messages()):
        scaled = torch.ones(())
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(torch.tensor([3.0])))  # type: ignore[attr-defined]
        return scaled.item()


def test_a_factor_of_one_element_scales_tensors_of_any_shape(run_workers: RunWorkers) -> None:
    assert run_workers(factor, 2) == [6.0] * 2
