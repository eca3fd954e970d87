"""What workers count, so that the end of all work can be told from outside (see ``termination``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Peer", "Report", "is_balanced"]

Peer = int
"""A worker, by its incarnation."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has to say about itself at one moment.

    The counts are of messages that can cause work: calls and control messages, but not replies, and not the
    messages of this protocol. A message is counted as sent before it is on its way, and as received no
    later than ``active`` has risen for it.

    Attributes:
        active: what is under way here: calls running, queued or waited for, callbacks, messages that are
            not acknowledged.
        sent: messages sent so far, by receiver.
        received: messages received so far, by sender.
    """

    active: int
    sent: Mapping[Peer, int] = field(default_factory=dict)
    received: Mapping[Peer, int] = field(default_factory=dict)


def is_balanced(reports: Mapping[Peer, tuple[frozenset[Peer], Report]]) -> bool:
    """Whether all that was sent was received, or both sides know that their connection is broken.

    Args:
        reports: of each worker, whom it has lost, and what it counts.
    """
    for sender, (lost_by_sender, sender_report) in reports.items():
        for receiver, (lost_by_receiver, receiver_report) in reports.items():
            broken = receiver in lost_by_sender
            if broken != (sender in lost_by_receiver):
                return False
            sent, received = sender_report.sent.get(receiver, 0), receiver_report.received.get(sender, 0)
            if not broken and sent != received:
                return False
    return True
