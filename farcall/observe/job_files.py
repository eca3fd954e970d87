"""Small JSON files in the folder of a job: orders to its workers, and what its launcher has noted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

__all__ = ["read_facts", "write_facts"]

_MAX_BYTES: Final = 1 << 16


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write a file that only this user can read, in one step. Raises ``OSError``."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.touch(mode=0o600)
    written.write_text(json.dumps(facts))
    written.replace(path)


def read_facts(path: Path) -> dict[str, Any]:
    """Read a file; empty if there is none, or it is damaged or of another user."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        found = json.loads(os.read(file, _MAX_BYTES)) if os.fstat(file).st_uid == os.getuid() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(file)
    return found if isinstance(found, dict) else {}
