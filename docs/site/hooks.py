"""The build of the site: what of a page or a docstring is shown differently there."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from typing import Any

__all__ = ["on_page_markdown", "with_fences"]

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
_LITERAL = re.compile(
    r"^(?P<indent> *)(?P<text>[^\n]*)::\n\n(?P<code>(?:(?P=indent) +[^\n]*\n|\n)+)", re.MULTILINE
)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show links to files outside of ``docs``, such as examples, as text."""
    folder = os.path.dirname(page.file.src_uri)

    def shown(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, found[2]))
        return found[1] if target.startswith("..") else found[0]

    return _LINK.sub(shown, markdown)


def with_fences(text: str) -> str:
    """Return a docstring whose literal blocks, which are indented after ``::``, are fenced as in Markdown."""

    def fenced(found: re.Match[str]) -> str:
        indent, text = found["indent"], found["text"]
        code = textwrap.dedent(found["code"]).strip("\n")
        title = "**Example**" if text in ("Example", "Examples") else f"{text}:" if text else ""
        lines = [title, "", f"```{_language(code)}", *code.splitlines(), "```", ""]
        return "".join(f"{indent}{line}".rstrip() + "\n" for line in lines)

    return _LITERAL.sub(fenced, text + "\n").rstrip("\n")


def _language(code: str) -> str:
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"
