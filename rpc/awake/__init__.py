"""Cores of a virtual machine that stay awake while its host would give them to others.

A core on which nothing runs falls asleep, and in a virtual machine its host may then give it away, and give
it back milliseconds after it is wanted again. Where two workers take turns, as the caller and the callee of
a call do, one of them sleeps at any time. On a host that has much else to do a training step took twice as
long for it (measured), though the worker's own threads computed as long as ever. Such a host is told by the
time that it *steals*: in which a core would have run, and was not let.

So while messages follow each other quickly and much time is stolen, a thread that does nothing runs on each
of the cores that the messages are sent from, at the priority ``SCHED_IDLE``: whoever else of the same
session or control group wants to run there displaces it at once, and where the kernel looks for an idle
core, it takes such a one to be idle. If that does not help, since the time is stolen for another reason, it
is not done for a while. On a machine of its own nothing is stolen, and nothing of this is done; nor where a
control group limits how much time the process gets.

It has its price, so it is the user's to ask for. Processes of other sessions share the core with the thread
as with any other. And a thread of the lowest priority takes its time to end where others compute: a process
that is killed meanwhile is gone, and missed by others, some tenths of a second later, and seconds if it was
large.

- ``wakefulness.py``: when, and on which cores. Pure.
- ``spinner.py``: the thread.
- ``accounts.py``: what the kernel says about time that is stolen, and about limits.
"""

from __future__ import annotations

from collections.abc import Callable

from rpc.awake.accounts import is_limited, usage
from rpc.awake.spinner import AVAILABLE, Spinner, current_core, spinning
from rpc.awake.wakefulness import Wakefulness

__all__ = ["Wakefulness", "new_wakefulness", "spinning"]


def new_wakefulness(
    soon: Callable[[Callable[[], None]], object],
    later: Callable[[float, Callable[[], None]], object],
) -> Wakefulness | None:
    """What keeps cores awake for an agent; None where that is impossible or of no use.

    Args:
        soon: has a function called on the loop's thread.
        later: the same, after some seconds.
    """
    until_now = usage()
    if not AVAILABLE or until_now is None or not until_now.stolen or is_limited():
        return None
    return Wakefulness(Spinner, current_core, usage, soon, later)
