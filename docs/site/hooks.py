"""The build of the site: links to files outside of ``docs`` become text, since those are not on the site."""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["on_page_markdown"]

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show links to files outside of ``docs``, such as examples, as text."""
    folder = os.path.dirname(page.file.src_uri)

    def shown(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, found[2]))
        return found[1] if target.startswith("..") else found[0]

    return _LINK.sub(shown, markdown)
