"""``make test-newest`` and ``make test-newest-smoke``: tests on the newest Python and PyTorch."""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Final

from tests.newest.environment import ROOT, Environment, Unavailable, found, made_from_files, made_from_index

TRIALS: Final = """
import sys
from farcall.trials import TRIALS
found = [each.run() for each in TRIALS]
print(*found, sep="\\n", flush=True)
sys.exit(any(each.is_wrong for each in found))
"""
"""Each part of farcall, tried as ``farcall doctor`` does, which looks at the machine and its network, too."""

SMOKE: Final = (
    ("-c", TRIALS),
    (
        *("-m", "pytest", "-q", "-m", "not nightly", "-p", "no:cacheprovider"),
        "tests/unit/test_guard.py",
        "tests/unit/spmd/test_torch_internals.py",
        "tests/unit/spmd/engine/test_attention.py",
        "tests/group/spmd/collectives/test_backend_face.py",
        "tests/group/spmd/collectives/test_flight_recorder.py",
        "tests/group/rpc/agent/test_calls.py",
    ),
)
"""What CI runs: each part of farcall once, and what depends on the version of PyTorch."""

WHOLE: Final = (
    ("-m", "farcall", "doctor"),
    ("-m", "pytest", "-m", "not nightly", "tests/unit", "tests/group"),
    ("-m", "pytest", "tests/group/examples/test_guide.py", "tests/unit/test_requirements.py"),
)
"""Unit tests, group tests, every session of the guide, and whether the requirements are up to date."""


def main() -> int:
    """Run the tests, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.newest", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="what CI runs, which downloads nothing")
    smoke = parser.parse_args().smoke
    try:
        environment = (found() or made_from_files()) if smoke else made_from_index()
    except Unavailable as reason:
        print(f"{'skipped' if smoke else 'failed'}: tests on a newer PyTorch: {reason}", flush=True)
        return int(not smoke)
    print(f"tests on {environment.description}", flush=True)
    return max(_run(environment, arguments) for arguments in (SMOKE if smoke else WHOLE))


def _run(environment: Environment, arguments: tuple[str, ...]) -> int:
    """Run a command of the environment from the repository's root."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([environment.python, *arguments], cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
