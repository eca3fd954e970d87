from __future__ import annotations

from tests.support.stacks import condensed

IDLE = """\
  File "/farcall/rpc/runtime/executor.py", line 323 in _wait
  File "/usr/lib/python3.11/threading.py", line 975 in run
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap"""

PRINTED = f"""\
a warning

Fatal Python error: Aborted

Thread 0x01 (most recent call first):
{IDLE}

Thread 0x02 (most recent call first):
{IDLE}

Current thread 0x03 (most recent call first):
  Garbage-collecting
  File "/usr/lib/python3.11/threading.py", line 622 in wait
  File "/farcall/rpc/runtime/blocking.py", line 52 in wait_for
  File "/farcall/tests/support/fork_server.py", line 241 in _become_worker
  File "/farcall/tests/conftest.py", line 45 in pytest_configure

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)"""


def test_equal_stacks_are_shown_once_and_without_what_all_have_in_common() -> None:
    assert [line for line in condensed(PRINTED.splitlines()) if line] == [
        "a warning",
        "Fatal Python error: Aborted",
        "Thread 0x01 (most recent call first): and 1 more like it",
        '  File "/farcall/rpc/runtime/executor.py", line 323 in _wait',
        "Current thread 0x03 (most recent call first):",
        "  Garbage-collecting",
        '  File "/usr/lib/python3.11/threading.py", line 622 in wait',
        '  File "/farcall/rpc/runtime/blocking.py", line 52 in wait_for',
    ]
