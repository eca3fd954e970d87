"""An extension of griffe, which reads the docstrings for the reference."""

from __future__ import annotations

from typing import Any

import griffe

from docs.site.hooks import with_fences

__all__ = ["LiteralBlocks"]


class LiteralBlocks(griffe.Extension):
    """Shows literal blocks as code: see ``with_fences``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring when the object has been read."""
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)
