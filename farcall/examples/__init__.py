"""What the programs in ``examples`` share: command line, data, a small language model, progress bars.

It is installed with farcall, so a copy of an example runs anywhere.
"""

from __future__ import annotations

from farcall.examples.command_line import (
    add_group_arguments,
    example_parser,
    parse_arguments,
    positive,
    rate,
)
from farcall.examples.data import Images, Text, load_images, load_text
from farcall.examples.progress import (
    LiveProgress,
    live_progress,
    live_progresses,
    print_figures,
    print_line,
)
from farcall.examples.running import (
    Miss,
    Preempted,
    add_checkpoint_argument,
    ending,
    preempted,
    restored,
    run_example,
    run_workers,
    save,
)
from farcall.examples.transformer import HEADS, Block, Transformer

__all__ = [
    "HEADS",
    "Block",
    "Images",
    "LiveProgress",
    "Miss",
    "Preempted",
    "Text",
    "Transformer",
    "add_checkpoint_argument",
    "add_group_arguments",
    "ending",
    "example_parser",
    "live_progress",
    "live_progresses",
    "load_images",
    "load_text",
    "parse_arguments",
    "positive",
    "preempted",
    "print_figures",
    "print_line",
    "rate",
    "restored",
    "run_example",
    "run_workers",
    "save",
]
