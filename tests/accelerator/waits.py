"""Deletes each wait for devices in turn, and shows which test notices: ``python -m tests.accelerator.waits``.

A wait is a line that makes a stream or a thread wait for a device, or keeps memory from being reused early.
For each one the tree is copied, the line is taken out of the copy, and the tests of devices run there in the
mode ``lazy``, where what nothing waits for does not happen. At least one must fail.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tests.support.deletions import Deletion, report, run

_STREAMS: Final = "test_streams_wait or test_memory_of"

WAITS: Final = (
    Deletion(
        "the sending stream waits for the caller's stream",
        "rpc/devices/staging.py",
        "stream.wait_event(_current_stream(device).record_event())",
    ),
    Deletion(
        "a small tensor is taken before later work on the caller's stream",
        "rpc/devices/staging.py",
        "elements = elements.clone()",
        tests="test_what_was_sent",
    ),
    Deletion(
        "memory that is taken on the caller's stream is recorded",
        "rpc/devices/staging.py",
        "use_on_current_stream(elements)",
        tests="test_memory_is_kept",
    ),
    Deletion(
        "the receiver waits until it has read the sender's memory",
        "rpc/devices/ipc.py",
        "torch.accelerator.current_stream(target.device).synchronize()",
        tests="test_what_was_sent",
    ),
    Deletion("the message waits for its copies", "rpc/devices/staging.py", "event.synchronize()"),
    Deletion(
        "a consumer's stream waits for a future's or a reference's tensors",
        "rpc/devices/streams.py",
        "current.wait_event(event)",
    ),
    Deletion("Future.wait joins", "rpc/agent/futures.py", "self._arrival.join()"),
    Deletion(
        "the value of a callback, and what it has made, are waited for",
        "rpc/devices/arrival.py",
        "following._made(found.tensors, found.may_have_more)",
        tests="test_streams_wait_for_tensors_anywhere or test_streams_wait_for_tensors_that",
    ),
    Deletion("a reference's value joins", "rref/value.py", "self._made.join(self.content)"),
    Deletion(
        "a reference's value waits for what other requests did to it",
        "rpc/devices/streams.py",
        "Shared.renew_all([(shared, use) for shared, use in uses if shared is not None])",
        tests="test_requests_on_one_object",
    ),
    Deletion(
        "a request's own calls wait for what it did to its objects",
        "rpc/devices/codecs.py",
        "share()",
        tests="test_a_request_s_own_calls",
    ),
    Deletion(
        "a coroutine waits for what others did to its object meanwhile",
        "rpc/devices/streams.py",
        "shared.use_again(use)",
        tests="test_what_coroutines_do",
    ),
    Deletion(
        "a task that a coroutine creates is on its streams",
        "rpc/runtime/isolation.py",
        "coroutine = this_thread.streams.of_coroutine().follow(coroutine)",
        tests="test_what_a_coroutine_starts",
    ),
    Deletion(
        "a function that a coroutine runs on a thread is on its streams",
        "rpc/runtime/isolation.py",
        "run = _isolated if streams is None else streams.of_coroutine().around(_isolated)",
        instead="run = _isolated",
        tests="test_what_a_coroutine_starts",
    ),
    Deletion(
        "gradients that are held back wait for the device's thread",
        "dist_autograd/backwards.py",
        "work.join(gradients)",
        tests="test_gradients",
    ),
    Deletion(
        "the gradients of a context are joined",
        "dist_autograd/contexts.py",
        "self._work.join(found)",
        tests="test_gradients",
    ),
    Deletion(
        "a recv waits for gradients on other devices",
        "dist_autograd/device_threads.py",
        "torch.accelerator.synchronize(device.index)",
        tests="test_gradients_are",
    ),
    Deletion(
        "requests, parts of a backward and callbacks wait for optimizers' steps",
        "rpc/devices/streams.py",
        "self._updates.wait()",
        tests="test_requests_after_a_step or test_what_comes_after",
    ),
    Deletion(
        "a thread that an answer comes to waits for optimizers' steps",
        "rpc/agent/calls.py",
        "self.border.catch_up()",
        tests="test_what_comes_after",
    ),
    Deletion(
        "a user of a reference's value waits for optimizers' steps",
        "rpc/devices/streams.py",
        "updates.wait()",
        tests="test_a_reference_shows",
    ),
    Deletion(
        "a backward waits for the optimizers' steps before it",
        "dist_autograd/worker_pass.py",
        "border.catch_up()",
        tests="test_a_backward_goes_on",
        which=1,
    ),
    Deletion(
        "a backward waits for the optimizers' steps before gradients arrive",
        "dist_autograd/worker_pass.py",
        "border.catch_up()",
        tests="test_gradients_that_come_after",
        which=2,
    ),
    Deletion(
        "a step is part of what later requests wait for",
        "rpc/devices/installation.py",
        "self.updates.renew()",
        tests="test_a_step_without_a_request",
        which=1,
    ),
    Deletion(
        "states and schedulers of an optimizer take turns with its steps",
        "dist_optim/local_optimizer.py",
        "with self._locks.held(), _updates(self._optimizer):",
        "with self._locks.held():",
        tests="test_a_step_has or test_a_state_is",
        which=1,
    ),
    Deletion(
        "a backward within another is on the streams of the thread that begins it",
        "dist_autograd/root.py",
        "run = self.own.context.requests.border.elsewhere(self.own.run)",
        instead="run = self.own.run",
        tests="test_a_backward_in_a_hook",
    ),
    Deletion(
        "memory that is read on another stream is recorded",
        "rpc/devices/streams.py",
        "tensor.record_stream(_current_stream(tensor.device))",
        tests="test_memory_is_kept or test_training or test_gradients",
    ),
    Deletion(
        "what an optimizer keeps is waited for and recorded, in turn",
        "rpc/devices/installation.py",
        "self.updates.join(updater)",
        tests="test_what_a_step_keeps",
    ),
    Deletion(
        "memory of an object's tensors is recorded each time it is used",
        "rpc/devices/streams.py",
        "use_on_current_stream(tensor)",
        tests="test_memory_is_kept_of_what",
        which=2,
    ),
    Deletion(
        "memory that is being copied for a message is recorded",
        "rpc/devices/staging.py",
        "elements.record_stream(stream)",
        tests="test_memory_is_kept",
    ),
    Deletion(
        "a collective waits for the caller's streams",
        "spmd/collectives/staged.py",
        "self._called.join()",
        tests="test_operations_wait",
    ),
    Deletion(
        "a collective's messages wait for their copies",
        "rpc/devices/staging.py",
        "_current_stream(tensor.device).synchronize()",
        tests="test_operations_wait",
    ),
    Deletion(
        "a waiting thread's streams wait for a collective's results",
        "spmd/collectives/work.py",
        "self._staged.join()",
        tests="test_operations_wait",
    ),
    Deletion(
        "what comes after a step of a served function waits for its streams",
        "rpc/runtime/own_streams.py",
        "stream.wait_event(left.record_event())",
        tests="test_what_is_left_on_streams",
    ),
    Deletion(
        "an operation of a model of several workers waits for its inputs",
        "spmd/tensor_parallel/coordinator.py",
        "operation.work.join(operation.args)",
        tests="test_a_model_of_several_workers",
    ),
    Deletion(
        "a part of a model waits for what it is sent",
        "spmd/tensor_parallel/shard.py",
        "arrived.work.join(task.args)",
        tests="test_a_model_of_several_workers",
    ),
)


def _notices(wait: Deletion, folder: Path) -> str:
    """The tests that fail without a wait."""
    chosen = f"({wait.tests or _STREAMS}) and (lazy or not (eager or random))"
    options = ("-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider")
    ended = run(folder, "-m", "pytest", *options, "tests/group/devices", "-k", chosen)
    failed = [
        line.split("::")[1].split(" ")[0] for line in ended.stdout.splitlines() if line.startswith("FAILED")
    ]
    if ended.returncode == 0:
        return ""
    return ", ".join(failed) or "an error"


def main() -> int:
    """Print the table; returns 1 if a wait can be deleted unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="one of them, by its number, from 1 on")
    return report(WAITS, _notices, parser.parse_args().only)


if __name__ == "__main__":
    sys.exit(main())
