"""What a call must raise, and what its text must say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def refused(
    error: type[BaseException], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    """The text of the error that ``call(*args, **kwargs)`` must raise, without its notes.

    Args:
        error: its type.
        match: a pattern that must be found in the text.
        call: what is called with the other arguments.
    """
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert re.search(match, text), f"{match!r} is not in {text!r}"
    return text
