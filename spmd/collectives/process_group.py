"""The interface towards PyTorch: a c10d ``ProcessGroup`` whose operations are those of a ``Group``.

c10d passes nested lists of tensors and option objects, calls some operations by several names, and allows
tensors of any layout. Here all that becomes flat lists of contiguous tensors and a signature. Tensors on an
accelerator are staged through the host (``staged``).
"""

# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from rpc.errors import InvalidOptionError
from spmd.collectives.algorithms import Algorithms
from spmd.collectives.arguments import Arguments, describe, seconds_of
from spmd.collectives.backend_face import BackendFace
from spmd.collectives.group import Group
from spmd.collectives.memory import pieces
from spmd.collectives.messages import ANY
from spmd.collectives.monitored import monitored_barrier
from spmd.collectives.signature import signature, text_of
from spmd.collectives.work import GroupWork

if TYPE_CHECKING:
    from spmd.collectives.staged import Staged

__all__ = ["FarcallProcessGroup"]

Tensors = Sequence[torch.Tensor]

_UNSET: Final = timedelta(milliseconds=-1)


class FarcallProcessGroup(BackendFace):
    """The process group of backend ``farcall``.

    Args:
        group: the group, formed.
        store: store of its ranks.
    """

    def __init__(self, group: Group, store: Store | None = None) -> None:
        super().__init__(group, store)
        self._name, self._desc = group.members.name, "undefined"
        self._arguments = Arguments(group.members.name, group.members.rank, group.members.size)
        self._stages: set[str] = set()

    def __repr__(self) -> str:
        return f"process group '{self._name}' of {self.getSize()} ranks"

    # ---- what c10d asks of a group

    def getBackendName(self) -> str:  # noqa: N802
        return "farcall"

    def getRank(self) -> int:  # noqa: N802
        return self.group.members.rank

    def getSize(self) -> int:  # noqa: N802
        return self.group.members.size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = self.group.record.description = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def shutdown(self) -> None:
        """Leave the group."""
        self.group.close()

    def abort(self) -> None:
        """End everything in progress on all ranks, and the group with it."""
        self.group.abort("abort was called")

    # ---- operations: each rank's tensor

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        tensor = self._arguments.one(tensors, "all_reduce")
        if tensor.layout == torch.sparse_coo:
            return self._all_reduce_sparse(tensor, opts)
        reduction = self._arguments.reduction(opts, "all_reduce", tensor)
        field = signature("all_reduce", tensor.dtype, tensor.shape, reduction.name)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = _flat(tensor)
            algorithms.all_reduce(field, deadline, flat, reduction)
            _settle(flat, tensor)

        return self._run(field, [tensor], perform, opts)

    def _all_reduce_sparse(self, tensor: torch.Tensor, opts: Any) -> GroupWork:
        reduction = self._arguments.reduction(opts, "all_reduce", tensor)
        if reduction.name != "sum":
            raise ValueError(
                f"all_reduce at rank {self.getRank()}: sparse tensors can be reduced by sum, not by "
                f"{reduction.name}"
            )
        field = signature("all_reduce of sparse tensors", tensor.dtype, tensor.shape, reduction.name)

        @torch.inference_mode(False)  # the tensor gets new parts, which must be like those of any other
        @torch.no_grad()
        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            mine = tensor.coalesce().cpu()
            counts = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.getSize())]
            mine_count = torch.tensor([mine.values().shape[0]], device="cpu")
            algorithms.all_gather(field, deadline, counts, mine_count)
            indices, values = mine.indices().contiguous(), mine.values().contiguous()
            rows = [indices.new_empty((indices.shape[0], int(count))) for count in counts]
            algorithms.all_gather(field, deadline, rows, indices)
            parts = [values.new_empty((int(count), *values.shape[1:])) for count in counts]
            algorithms.all_gather(field, deadline, parts, values)
            total = torch.sparse_coo_tensor(
                torch.cat(rows, 1), torch.cat(parts), tensor.shape, check_invariants=False
            )
            tensor.copy_(total.coalesce())

        return self._run(field, [tensor], perform, opts, layout=torch.sparse_coo)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        reduction = self._arguments.reduction(opts, "all_reduce_coalesced", *tensors)
        shapes = _describe_all(tensors)
        field = signature("all_reduce_coalesced", None, None, reduction.name, -1, shapes)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same = [tensor for tensor in tensors if tensor.dtype == dtype]
                flat = _flat(torch.cat([tensor.reshape(-1) for tensor in same]))
                algorithms.all_reduce(field, deadline, flat, reduction)
                sizes = [tensor.numel() for tensor in same]
                for tensor, part in zip(same, pieces(flat, sizes), strict=True):
                    tensor.copy_(part.view(tensor.shape), non_blocking=not tensor.is_cpu)

        return self._run(field, list(tensors), perform, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        tensor = self._arguments.one(tensors, "reduce")
        reduction = self._arguments.reduction(opts, "reduce", tensor)
        root = self._arguments.root(opts, "reduce")
        field = signature("reduce", tensor.dtype, tensor.shape, reduction.name, root)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = _flat(tensor)
            algorithms.reduce(field, deadline, flat, reduction, root)
            if self.getRank() == root:
                _settle(flat, tensor)

        return self._run(field, [tensor], perform, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        tensor = self._arguments.one(tensors, "broadcast")
        root = self._arguments.root(opts, "broadcast")
        field = signature("broadcast", tensor.dtype, tensor.shape, "", root)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = _flat(tensor)
            algorithms.broadcast(field, deadline, flat, root)
            if self.getRank() != root:
                _settle(flat, tensor)

        return self._run(field, [tensor], perform, opts)

    def barrier(self, opts: Any = None) -> GroupWork:
        return self._run(
            signature("barrier"),
            [],
            lambda algorithms, field, deadline: algorithms.barrier(field, deadline),
            opts,
        )

    def monitored_barrier(self, timeout: timedelta = _UNSET, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and name the missing ones if they do not come.
        ``torch.distributed.monitored_barrier`` refuses all backends except gloo, so call this method of the
        group.

        Args:
            timeout: maximum time to wait; default: the timeout of the group's operations.
            wait_all_ranks: whether to name all missing ranks, and not only the first.

        Raises:
            CollectiveTimeoutError: not all ranks have come.
            TypeError, ValueError: ``timeout`` is not a ``timedelta``, or negative.
        """
        given = self._limit(timeout, "monitored_barrier")
        seconds = self.group.timeout if given is None else max(given, 0.001)
        monitored_barrier(self.group, seconds, wait_all_ranks)

    # ---- operations: to all, from all

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        targets = list(self._arguments.one(outputs, "all_gather"))
        mine = self._arguments.one(inputs, "all_gather")
        self._arguments.check_count(targets, "all_gather", "output")
        self._arguments.check_dtypes([mine, *targets], "all_gather")
        field = signature("all_gather", mine.dtype)
        return self._run(field, targets, partial(self._perform_all_gather, targets, mine), opts, [mine])

    def _perform_all_gather(
        self, outputs: Tensors, mine: torch.Tensor, algorithms: Algorithms, field: bytes, deadline: float
    ) -> None:
        flat = [_room(each) for each in outputs]
        algorithms.all_gather(field, deadline, flat, _flat(mine))
        for part, output in zip(flat, outputs, strict=True):
            _settle(part, output)

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        size = self.getSize()
        self._arguments.check_parts("all_gather", "output", outputs, "input", inputs)
        shapes = _describe_all(inputs)
        field = signature("all_gather_single", None, None, "", -1, shapes)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                flat = _room(output)
                algorithms.all_gather(
                    field,
                    deadline,
                    list(flat.view(-1).chunk(size)) if flat.numel() else [flat] * size,
                    _flat(mine),
                )
                _settle(flat, output)

        return self._run(field, list(outputs), perform, opts, inputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        lengths = [len(parts) for parts in outputs]
        if lengths != [len(inputs)] * self.getSize():
            raise ValueError(
                f"all_gather_coalesced at rank {self.getRank()}: there must be {self.getSize()} lists of "
                f"{len(inputs)} outputs, got lists of {lengths}"
            )
        by_input = list(zip(*outputs, strict=True))
        for parts, mine in zip(by_input, inputs, strict=True):
            self._arguments.check_dtypes([mine, *parts], "all_gather_coalesced")
        shapes = _describe_all(inputs)
        field = signature("all_gather_coalesced", None, None, "", -1, shapes)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            for parts, mine in zip(by_input, inputs, strict=True):
                self._perform_all_gather(parts, mine, algorithms, field, deadline)

        return self._run(field, [each for parts in outputs for each in parts], perform, opts, inputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        mine, root = self._arguments.one(inputs, "gather"), self._arguments.root(opts, "gather")
        is_root = self.getRank() == root
        targets = list(self._arguments.one(outputs, "gather")) if is_root else []
        if is_root:
            self._arguments.check_count(targets, "gather", "output")
        self._arguments.check_dtypes([mine, *targets], "gather")
        field = signature("gather", mine.dtype, None, "", root)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = [_room(each) for each in targets] if is_root else None
            algorithms.gather(field, deadline, flat, _flat(mine), root)
            for part, target in zip(flat or [], targets, strict=True):
                _settle(part, target)

        return self._run(field, targets, perform, opts, [mine])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        output, root = self._arguments.one(outputs, "scatter"), self._arguments.root(opts, "scatter")
        is_root = self.getRank() == root
        sources = list(self._arguments.one(inputs, "scatter")) if is_root else []
        if is_root:
            self._arguments.check_count(sources, "scatter", "input")
        self._arguments.check_dtypes([output, *sources], "scatter")
        field = signature("scatter", output.dtype, None, "", root)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = _room(output)
            given = [_flat(each) for each in sources] if is_root else None
            algorithms.scatter(field, deadline, flat, given, root)
            _settle(flat, output)

        return self._run(field, [output], perform, opts, sources)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> GroupWork:
        output = self._arguments.one(outputs, "reduce_scatter")
        sources = list(self._arguments.one(inputs, "reduce_scatter"))
        self._arguments.check_count(sources, "reduce_scatter", "input")
        self._arguments.check_dtypes([output, *sources], "reduce_scatter")
        return self._reduce_scatter("reduce_scatter", [output], [sources], opts)

    def reduce_scatter_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [mine], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        size = self.getSize()
        self._arguments.check_parts("reduce_scatter", "input", inputs, "output", outputs)
        self._arguments.check_tensors("reduce_scatter_single", inputs)
        sources = [
            list(_dense(mine).view(-1).chunk(size)) if mine.numel() else [mine] * size for mine in inputs
        ]
        return self._reduce_scatter("reduce_scatter_single", outputs, sources, opts)

    def _reduce_scatter(
        self, name: str, outputs: Tensors, sources: Sequence[Tensors], opts: Any
    ) -> GroupWork:
        reduction = self._arguments.reduction(opts, name, *outputs)
        for output, parts in zip(outputs, sources, strict=True):
            for part in parts:
                if part.numel() != output.numel():
                    raise ValueError(
                        f"{name} at rank {self.getRank()}: all inputs must have the output's size; "
                        f"got {describe(part)} for {describe(output)}"
                    )
        shapes = _describe_all(outputs)
        field = signature(name, None, None, reduction.name, -1, shapes)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            for output, parts in zip(outputs, sources, strict=True):
                flat = _room(output)
                algorithms.reduce_scatter(field, deadline, flat, [_flat(each) for each in parts], reduction)
                _settle(flat, output)

        return self._run(field, list(outputs), perform, opts, [each for parts in sources for each in parts])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        mine: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        takes = self._arguments.splits(output, output_sizes, "output")
        gives = self._arguments.splits(mine, input_sizes, "input")
        self._arguments.check_dtypes([mine, output], "all_to_all_single")
        field = signature("all_to_all_single", mine.dtype)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = _room(output)
            algorithms.all_to_all(field, deadline, pieces(flat, takes), pieces(_flat(mine), gives))
            _settle(flat, output)

        return self._run(field, [output], perform, opts, [mine])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        self._arguments.check_count(outputs, "all_to_all", "output")
        self._arguments.check_count(inputs, "all_to_all", "input")
        self._arguments.check_dtypes([*inputs, *outputs], "all_to_all")
        field = signature("all_to_all", inputs[0].dtype)

        def perform(algorithms: Algorithms, field: bytes, deadline: float) -> None:
            flat = [_room(each) for each in outputs]
            algorithms.all_to_all(field, deadline, flat, [_flat(each) for each in inputs])
            for part, output in zip(flat, outputs, strict=True):
                _settle(part, output)

        return self._run(field, list(outputs), perform, opts, inputs)

    # ---- from rank to rank

    def send(self, tensors: Tensors, to: int, tag: int) -> GroupWork:
        tensor = self._arguments.one(tensors, "send")
        self._arguments.check_rank(to, "send to")
        self._arguments.check_tag(tag, "send")
        if self._arguments.check_tensors("send", [tensor]):
            self._check_staged(tensor.device.type)
        return self.group.messages.send(_flat(tensor), to, tag, self.group.timeout)

    def recv(self, tensors: Tensors, source: int, tag: int) -> GroupWork:
        self._arguments.check_rank(source, "receive from")
        return self._receive(self._arguments.one(tensors, "recv"), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> GroupWork:
        return self._receive(self._arguments.one(tensors, "recv"), ANY, tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> GroupWork:
        self._arguments.check_tag(tag, "receive")
        if self._arguments.check_tensors("receive", [tensor]):
            self._check_staged(tensor.device.type)
        self._arguments.check_writable("receive", [tensor])
        staged = None if tensor.is_cpu else _staged([tensor])
        flat = _room(tensor)
        work = self.group.messages.receive(flat, source, tag, self.group.timeout)
        if staged is not None:
            work.stage(staged, [tensor])
            work.then(partial(staged.run, partial(_settle, flat, tensor)))
        elif flat is not tensor:
            work.then(partial(_settle, flat, tensor))
        return work

    # ---- arguments

    def _check_staged(self, kind: str) -> None:
        """Raise if c10d was asked for another backend for this type of device.

        c10d makes a group that is written in Python the group of all devices, whatever their backends.
        """
        self.group.members.check()
        if kind in self._stages:
            return
        try:
            config = dist.get_backend_config(self)
        except TypeError:  # c10d does not know the group: it was split from another one
            config = ""
        backends = dict(pair.split(":") for pair in config.split(",") if pair)
        if backends.get(kind, "farcall") != "farcall":
            raise InvalidOptionError(
                f"{self} has the backend '{config}', but torch.distributed.init_process_group cannot pair "
                f"'farcall' with '{backends[kind]}'. Call rpc.init_rpc and spmd.init_process_group(), "
                "which can; or torch.distributed.init_process_group('farcall'), which stages tensors on "
                f"{kind} through the host"
            )
        self._stages.add(kind)

    def _run(
        self,
        field: bytes,
        outputs: Tensors,
        perform: Callable[..., object],
        opts: Any,
        inputs: Tensors | None = None,
        layout: torch.layout = torch.strided,
    ) -> GroupWork:
        on_accelerator = self._arguments.check_tensors(field, outputs, layout)
        on_accelerator |= self._arguments.check_tensors(field, inputs or ())
        self._arguments.check_writable(field, outputs)
        blocks = opts is not None and not opts.asyncOp
        timeout = self._limit(getattr(opts, "timeout", _UNSET), field) or None
        staged = None
        if on_accelerator:
            tensors = [*outputs, *(inputs or ())]
            self._check_staged(next(each.device.type for each in tensors if not each.is_cpu))
            staged = _staged(tensors)
            perform = _on_streams(staged, perform)
        return self.group.run(
            field, outputs, perform, blocks=blocks, timeout=timeout, inputs=inputs, staged=staged
        )

    def _limit(self, timeout: timedelta, what: str | bytes) -> float | None:
        """Return a timeout in seconds; None for c10d's value for no timeout."""
        if timeout == _UNSET:
            return None
        return seconds_of(
            timeout, f"{what if isinstance(what, str) else text_of(what)} at rank {self.getRank()}"
        )


def _describe_all(tensors: Tensors) -> str:
    return "; ".join(map(describe, tensors))


def _staged(tensors: Tensors) -> Staged:
    from spmd.collectives.staged import Staged  # which nothing needs without an accelerator

    return Staged(tensors)


def _on_streams(staged: Staged, perform: Callable[..., object]) -> Callable[..., object]:
    def run(*args: Any) -> None:
        staged.run(partial(perform, *args))

    return run


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory has these elements: the tensor itself, if it is one."""
    return (tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor).contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Like ``_dense``, in memory of the host."""
    if tensor.is_cpu:
        return _dense(tensor)
    from rpc.devices.staging import host_copy

    return host_copy(_dense(tensor))


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor to receive into, in memory of the host: the tensor itself, if it is one."""
    if not tensor.is_cpu:
        from rpc.devices.staging import host_memory

        return host_memory(tensor)
    if tensor.is_contiguous() and not _is_lazy(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its memory has the conjugates or the negatives of its elements."""
    return tensor.is_conj() or tensor.is_neg()


def _settle(flat: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what is in ``flat`` to ``tensor``, unless it is the same."""
    if flat is not tensor and (not tensor.is_cpu or flat.data_ptr() != tensor.data_ptr()):
        with torch.inference_mode():  # it may be a leaf that requires gradients, or an inference tensor
            if tensor.is_cpu or _is_lazy(tensor) or not tensor.is_contiguous():
                tensor.copy_(flat, non_blocking=not tensor.is_cpu)
            else:
                from rpc.devices.staging import copy_bytes

                copy_bytes(flat, tensor)
