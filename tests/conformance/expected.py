"""Which of PyTorch's tests cannot hold for farcall, and why. Kept by hand.

A name that is not a test is an error. ``pytest --runxfail`` runs these too.
"""

from __future__ import annotations

from typing import Final

FEWEST: Final = 390 + 276
"""Minimum number of tests, of RPC and of process groups, that are not listed here."""

_SHOWS_CALLS = (
    "expects torch.profiler to show no calls at all; farcall's are shown by all of PyTorch's profilers"
)
_TORCH_INTERNALS = "replaces internals of PyTorch's own implementation that have no counterpart in farcall"

_NEEDS_GPUS = "needs GPUs, and is not skipped where there are none"

_PROFILER_TESTS = (
    "test_profiler_with_async_rpc_udf",
    "test_profiler_with_async_rpc_udf_single_threaded",
)

CANNOT_HOLD: Final[dict[str, str]] = {
    **dict.fromkeys(_PROFILER_TESTS, _SHOWS_CALLS),
    "test_backward_unused_send_function": "expects backward to hang for ever where a result is unused; "
    "farcall's does not",
    "test_post_hooks": "expects hooks on the node that accumulates into .grad; that node does not run, "
    "since gradients go to the context",
    "test_trainer_ps_torchscript_functions": "a TorchScript function takes an RRef, and scripts know no "
    "class of that name but PyTorch's own",
    "test_shutdown_errors": _TORCH_INTERNALS,
    "test_custom_exception_throw_during_reconstruction": "expects RuntimeError for an exception whose "
    "constructor takes other arguments than its args; farcall rebuilds it without the constructor, so it "
    "arrives as its own class",
    "test_disable_gil_profiling": "expects PyTorch's measurement of waiting for the GIL; farcall makes none",
    "test_dynamic_and_static_init_rpc_together": "expects a dynamic worker to be refused by a static "
    "group whose processes are just ending; farcall asks whether they live, so it depends on who is quicker",
    **dict.fromkeys(
        (
            "test_all_to_all_cuda",
            "test_all_to_all_cuda_complex",
            "test_all_to_all_full_group_cuda",
            "test_all_to_all_group_cuda",
            "test_batch_isend_irecv_op_err",
        ),
        _NEEDS_GPUS,
    ),
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL, and is not skipped where there is none",
    "test_SyncBatchNorm_process_group": "needs torchvision, and is not skipped where there is none",
    "test_ddp_logging_data_cpu": "expects DistributedDataParallel to log the name gloo; a Python group tells "
    "C++ its own",
    "test_monitored_barrier_gloo_rank_0_timeout": "expects rank 0, given no time, to blame itself in gloo's "
    "words; farcall names who is missing",
    "test_op_with_invalid_args": "expects the error text of PyTorch's C++ operator dispatcher; farcall calls "
    "the operator itself, whose own TypeError says more",
}

FEWEST_ON_DEVICES: Final = 90
"""Minimum number of PyTorch's 100 tests of RPC with GPUs that are not listed below."""

CANNOT_HOLD_ON_DEVICES: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "test_cuda_future_can_extract_cuda_sparse_tensor",
            "test_cuda_future_can_extract_list_with_cuda_sparse_tensor",
            "test_cuda_future_can_extract_custom_class_with_cuda_sparse_tensor",
        ),
        "the simulated accelerator has no sparse tensors",
    ),
    "test_async_execution_nested_with_cuda_future": "a callback of then() reads an argument of its request "
    "on streams of its own and drops it, and nothing records that: the simulated device reuses and poisons "
    "the memory at once",
    "test_cuda_future_can_extract_custom_class_with_cuda_tensor": "PyTorch's futures know torch.cuda.Event, "
    "and not the events of other accelerators, in an object that they look for tensors in",
}
"""Which of PyTorch's tests with GPUs cannot hold on the simulated accelerator, and why."""
