"""What a call must raise, and what its text must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["refused"]


def refused(
    error: type[BaseException], match: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> str:
    """The text of the error that ``call(*args, **kwargs)`` must raise; ``match`` must be found in it."""
    with pytest.raises(error, match=match) as caught:
        call(*args, **kwargs)
    return str(caught.value)
