"""Tables that show which worker holds which part of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spmd.engine.driver.start import global_device_count
from spmd.sharding.op_sharding import OpSharding

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

__all__ = ["visualize_sharding", "visualize_tensor_sharding"]

_COLORS: Final = ("blue", "green", "magenta", "cyan", "red", "yellow", "white", "bright_black")


def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> Table:
    """Print a sharding as a table, a cell for each tile of the first two dimensions.

    Args:
        sharding: in the format of ``t.sharding_spec``. Further dimensions of the tensor must not be sharded.
        use_color: whether tiles have colours, if the terminal supports them; otherwise there are lines
            between them.
        scale: factor for the cells' heights and widths.
        min_width: minimum width of a cell, in characters.
        max_width: maximum width of the table, in characters.

    Returns:
        the table.

    Raises:
        ValueError: ``sharding`` is empty or none.

    Example::

        >>> _ = visualize_sharding("{devices=[2,2]0,1,2,3}", use_color=False)
        ┌───────┬───────┐
        │       │       │
        │ CPU 0 │ CPU 1 │
        ...
    """
    from rich import box
    from rich.align import Align
    from rich.console import Console
    from rich.padding import Padding
    from rich.style import Style
    from rich.table import Table

    cells = _cells(OpSharding.parse(sharding))
    console = Console(width=max_width)
    use_color = use_color and console.color_system is not None
    table = Table(
        show_header=False,
        show_lines=not use_color,
        padding=0,
        highlight=not use_color,
        pad_edge=False,
        box=None if use_color else box.SQUARE,
    )
    margin = max(int(scale), 0)
    for row, texts in enumerate(cells):
        columns = []
        for column, text in enumerate(texts):
            missing = max(int(min_width * scale) - len(text) - 2 * margin, 0)
            around = (margin, margin + (missing + 1) // 2, margin, margin + missing // 2)
            color = _COLORS[(row * len(texts) + column) % len(_COLORS)]
            style = Style(bgcolor=color) if use_color else Style()
            columns.append(Padding(Align(text, "center", vertical="middle"), around, style=style))
        table.add_row(*columns)
    console.print(table, end="\n\n")
    return table


def visualize_tensor_sharding(t: Tensor, **options: Any) -> Table:
    """Print the sharding of a tensor on the logical device; options are those of
    :func:`visualize_sharding`.
    """
    from spmd.sharding.marks import sharding_spec

    return visualize_sharding(sharding_spec(t), **options)


def _cells(sharding: OpSharding) -> list[list[str]]:
    """Return the text of each cell, row by row."""
    if not sharding.tiles:
        return [[f"CPU {list(range(global_device_count()))}"]]
    if any(count > 1 for count in sharding.tiles[2:]):
        raise ValueError(f"a table shows the first two dimensions of a tensor, and {sharding} cuts others")
    rows, columns = (*sharding.tiles, 1)[:2]
    holders = np.array(sharding.devices).reshape(rows, columns, -1).tolist()
    return [[f"CPU {each[0] if len(each) == 1 else each}" for each in row] for row in holders]
