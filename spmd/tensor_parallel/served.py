"""A model that is sharded over workers of the RPC group, behind one object: :class:`ShardedModule`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from dist_autograd import engine
from dist_autograd.api import autograd
from dist_optim import DistributedOptimizer
from dist_optim.fan_out import on_all_objects
from dist_optim.optimizer import check_context
from rpc.agent.futures import Future
from rpc.agent.waiting import wait_futures
from rpc.api import UNSET_RPC_TIMEOUT, get_worker_info, rpc_async, rpc_sync
from rpc.errors import AutogradError, RpcError, WorkerLostError
from rpc.runtime.torch_internals import pytree
from rref import RRef
from rref.remote_module.remote_device import RemoteDevice
from spmd.tensor_parallel.coordinator import Coordinator, coordinate
from spmd.tensor_parallel.errors import ParallelError, ParallelTypeError, ShardLostError
from spmd.tensor_parallel.shard import Call, Initialize, ModelShard, Parallelize, ShardMembership, make
from spmd.tensor_parallel.state_parts import StatePart, cut_state, whole_of
from spmd.workers.worker_set import wait_together

__all__ = ["ShardedModule", "build"]

T = TypeVar("T")


class ShardedModule:
    """A module whose parameters are sharded over workers; returned by ``parallelize_module`` with
    ``workers``.

    It is called like the module: all shards compute, and the result is returned here. Inside
    ``dist_autograd.context``, gradients flow through it to its parameters and to its inputs. It can be sent
    to other workers, which then use the same model; calls of all of them are executed one after the other.

    The inputs of a call are the same on all shards, and its results must be too, or be ``DTensor`` s, which
    are returned as whole tensors: give the last layer ``output_layouts=Replicate()`` or
    ``use_local_output=False``.

    Attributes:
        workers: names of the workers, by rank in the model.

    Raises:
        ShardLostError: by every method, if a shard is gone. The model has ended then.
        ParallelError: by every method, if the shards are not in step any more, or the model is closed; by a
            call that is to be differentiated, if this worker has a shard on a device.

    Example::

        model = parallelize_module(partial(Llama, shape), workers=["w1", "w2"], parallelize_plan=plan)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model.remote_parameters(), lr=1e-3)
        with dist_autograd.context() as context_id:
            loss = functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        model.save("checkpoint")
    """

    def __init__(
        self,
        workers: Sequence[str],
        shards: Sequence[RRef[ModelShard]],
        coordinator: RRef[Coordinator],
        device: torch.device,
    ) -> None:
        self.workers = tuple(workers)
        self._on_cpu = device.type == "cpu"
        self._shards = tuple(shards)
        self._coordinator = coordinator
        self._lost: ShardLostError | None = None

    # ---- calling it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output for these inputs; it has gradient history only in
        ``dist_autograd.context``.

        Raises:
            RpcTimeoutError: no answer within the timeout of calls.
            Exception: what ``forward`` raised, alike on all shards.
        """
        if not torch.is_grad_enabled() or autograd().contexts.current() is None:
            call = Call(*pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs)))
            return self._run("forward", call).value
        self._check_may_differentiate()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        result: list[Any] = []
        with torch.enable_grad():
            # There may be no other tensor that requires grad.
            anchor = torch.empty(0, device="cpu", requires_grad=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        following = iter(_Call.apply(self, leaves, structure, result, anchor, *tensors))  # type: ignore[no-untyped-call]
        return pytree.tree_map_only(Tensor, lambda _: next(following), result[0])

    def _check_may_differentiate(self) -> None:
        """PyTorch has one thread for the backward passes of a device. Here it would wait for the pass of the
        shard.
        """
        own = get_worker_info().name
        if not self._on_cpu and own in self.workers:
            raise ParallelError(
                f"worker '{own}' has a shard of this model on a device, so it cannot differentiate calls of "
                "the model: make them on a worker without a shard, or under torch.no_grad()"
            )

    def train(self, mode: bool = True) -> Self:
        """Set all shards to training mode, or to evaluation mode if not ``mode``."""
        self._run("train", mode)
        return self

    def eval(self) -> Self:
        """Set all shards to evaluation mode."""
        return self.train(False)

    # ---- its parameters

    def remote_parameters(self) -> list[RRef[Tensor]]:
        """Return references to the shards' parts of the parameters, as ``DistributedOptimizer`` accepts them.

        They are plain tensors, shard by shard: an optimizer that uses whole matrices or their norms sees
        parts. Replicated parameters occur once for each shard; ``clip_grad_norm_`` counts them once.
        """
        return [reference for found in self._of_all("parameters") for reference in found]

    def step(self, optimizer: DistributedOptimizer, context_id: int) -> None:
        """Perform one step of an optimizer, on all shards between the same two calls of the model.

        If the model has one client, ``optimizer.step`` does the same. If others call it as well, that would
        bypass the order of calls: a call that is under way may find some shards before the step, and some
        after it.

        Args:
            optimizer: optimizer of the model's parameters, and perhaps of others, which perform their step
                afterwards.
            context_id: the id that ``dist_autograd.context`` returned.

        Raises:
            AutogradError: there is no such context.
        """
        check_context(context_id)
        shards, others = dict[str, Any](), dict[str, Any]()
        for owner, local in optimizer.local_optimizers.items():
            (shards if owner in self.workers else others)[owner] = local
        self._run("step", shards, context_id)
        if others:
            on_all_objects(others, "step", lambda local: local.step(context_id))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on the CPU, combined here from the shards' parts; it is whole nowhere else."""
        parts: list[dict[str, StatePart]] = self._of_all("parts")
        return {name: whole_of([each[name] for each in parts]) for name in parts[0]}

    def load_state_dict(self, state: Mapping[str, Tensor] | str | Path) -> None:
        """Load a state.

        Args:
            state: whole tensors by name, of which each shard is sent its part; or the directory of a
                distributed checkpoint, which all workers must be able to read: each reads its own part.

        Raises:
            ParallelError: names or shapes in the mapping are not the model's. Nothing is changed then.
            CheckpointException: from a directory, likewise.
        """
        if isinstance(state, str | Path):
            self._run("load", str(Path(state).absolute()))
            return
        parts: list[dict[str, StatePart]] = self._of_all("parts")
        self._of_all("take", *cut_state(state, parts))

    def save(self, directory: str | Path) -> None:
        """Write the state into a distributed checkpoint, each shard its part.

        Args:
            directory: the same one for all workers.
        """
        self._run("save", str(Path(directory).absolute()))

    def close(self) -> None:
        """Free the shards, also those that are left of a model that has ended. Idempotent.

        Without it they stay until their workers end.
        """
        if self._lost is None:
            with self._naming_lost():
                self._coordinator.rpc_sync(timeout=0).close()
            return
        for worker, shard in zip(self.workers, self._shards, strict=True):
            if worker != self._lost.worker:
                shard.rpc_sync(timeout=0).close()

    def __repr__(self) -> str:
        return f"ShardedModule(workers={list(self.workers)})"

    # ---- asking the shards

    def _run(self, name: str, *args: Any) -> Any:
        with self._naming_lost():
            # The group limits what shards do; a caller has its own limit for calls.
            timeout = UNSET_RPC_TIMEOUT if name == "forward" else 0
            return self._coordinator.rpc_sync(timeout=timeout).run(name, args)

    def _of_all(self, name: str, *each: Any) -> list[Any]:
        """Return a method's results on all shards; with one argument for each shard, if any are given."""
        with self._naming_lost():
            calls = [
                getattr(shard.rpc_async(timeout=0), name)(*each[rank : rank + 1])
                for rank, shard in enumerate(self._shards)
            ]
            return wait_futures(calls)

    @contextmanager
    def _naming_lost(self) -> Iterator[None]:
        if self._lost is not None:
            raise ShardLostError.of(self._lost.rank, self._lost.worker, self._lost.reason)
        try:
            with _named(self.workers):
                yield
        except ShardLostError as error:
            self._lost = error
            raise


@contextmanager
def _named(workers: Sequence[str]) -> Iterator[None]:
    """If one of these workers is gone, say which shard it was."""
    try:
        yield
    except WorkerLostError as error:
        if isinstance(error, ShardLostError) or error.worker not in workers:
            raise
        raise ShardLostError.of(workers.index(error.worker), error.worker, error.reason) from error


class _Call(torch.autograd.Function):
    """A call of a model, as one node of the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any, model: ShardedModule, leaves: list[Any], structure: Any, result: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        wanted = tuple(ctx.needs_input_grad[5:])
        args, kwargs = pytree.tree_unflatten(
            [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )
        outcome = model._run("forward", Call(args, kwargs, wanted))
        result.append(outcome.value)
        outputs = [leaf for leaf in pytree.tree_leaves(outcome.value) if isinstance(leaf, Tensor)]
        pairs = list(zip(outputs, outcome.differentiable, strict=True))
        ctx.mark_non_differentiable(*[output for output, has_gradient in pairs if not has_gradient])
        ctx.model, ctx.number, ctx.wanted, ctx.differentiable = (
            model,
            outcome.number,
            wanted,
            outcome.differentiable,
        )
        ctx.context_id = autograd().contexts.current().id  # type: ignore[union-attr]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise AutogradError("gradients through a ShardedModule cannot be differentiated")
        given = [each for each, has in zip(gradients, ctx.differentiable, strict=True) if has]
        how = (ctx.number, given, ctx.context_id, engine.keeps_graph())
        found = iter(ctx.model._run("backward", *how))
        return None, None, None, None, None, *(next(found) if each else None for each in ctx.wanted)


def build(
    factory: Callable[[], nn.Module],
    workers: Sequence[str],
    parallelize: Parallelize,
    initialize: Initialize | None,
    max_batch_size: int,
    timeout: float,
) -> ShardedModule:
    """See ``parallelize_module``.

    Args:
        parallelize: cuts the module over a mesh; sent to the workers.
    """
    devices = _check(factory, workers)
    workers = list(devices)
    with _named(workers):
        made = wait_futures(
            [rpc_async(worker, make, args=(factory, devices[worker]), timeout=timeout) for worker in workers]
        )
        shards, ranks = zip(*made, strict=True)
        us = ShardMembership(
            f"served-{secrets.token_hex(8)}", tuple(workers), _world(workers, ranks), timeout
        )
        how = (parallelize, initialize, secrets.randbits(62))
        joining = [shard.rpc_async(timeout=0).join(us, rank, *how) for rank, shard in enumerate(shards)]
        wait_together(joining, partial(_undo, shards, joining))
        coordinator = rpc_sync(workers[0], coordinate, args=(shards, workers, max_batch_size))
        return ShardedModule(workers, shards, coordinator, devices[workers[0]])


def _undo(shards: Sequence[RRef[ModelShard]], joining: Sequence[Future[Any]], reason: str) -> None:
    """Free what is left of a model that could not be built. Why it could not is known; other errors are not
    told.
    """
    for shard in shards:
        with suppress(RpcError):
            shard.rpc_async(timeout=0).abort(f"the model could not be built: {reason}")
    for shard, future in zip(shards, joining, strict=True):
        with suppress(Exception):
            future.wait()
        with suppress(RpcError):
            shard.rpc_sync(timeout=0).close()


def _check(factory: Any, workers: Any) -> dict[str, torch.device]:
    """Return the device for each worker, by name."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ParallelTypeError(
            "expected, for workers, a function that makes the module, as functools.partial(Net, 512), got "
            f"{type(factory).__name__}: the workers build it themselves, without memory"
        )
    places = [] if isinstance(workers, str) else [RemoteDevice.parse(each) for each in workers]
    devices = {get_worker_info(place.worker).name: place.device for place in places}
    if not devices or len(devices) != len(places):
        raise ParallelError(f"expected the names of workers, each once, got {workers!r}")
    if len({device.type for device in devices.values()}) > 1:
        raise ParallelError(f"expected devices of one type, got {workers!r}")
    return devices


def _world(workers: Sequence[str], ranks: Sequence[int | None]) -> tuple[int, ...] | None:
    """The ranks of workers in the default process group that they share, if they have one."""
    known = tuple(rank for rank in ranks if rank is not None)
    if not known:
        return None
    if len(set(known)) != len(workers):
        raise ParallelError(
            "expected workers that have one default process group, or none, got "
            + ", ".join(f"'{worker}': rank {rank}" for worker, rank in zip(workers, ranks, strict=True))
        )
    return known
