"""Installs the engines by name and runs their tests: ``make test-engines``. Needs root and Debian's packages.

Python packages go into an environment of their own, ``.venv-engines``, over the one of the project. Each file
of tests has network namespaces and clusters of its own, so two files run at a time. The output of a file is
printed when it has ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = ROOT / ".venv-engines"
COMMANDS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
}
"""Commands, and the packages of Debian that have them."""

PACKAGES = ("ray==2.60.0", "torchx==0.7.0", "kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0")

FILES = ("ray_cluster", "slurm", "kubernetes", "mpi", "others")
"""Files of tests, the slowest first."""


def main() -> int:
    """Returns pytest's exit status."""
    path = f"/usr/sbin:/sbin:{os.environ['PATH']}"
    os.environ["PATH"] = path
    missing = [package for command, package in COMMANDS.items() if shutil.which(command) is None]
    if missing:
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
        for command in (["apt-get", "update"], install):
            subprocess.run(command, check=True, env=quiet, stdout=subprocess.DEVNULL)
    python = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / ".ready"
    if not ready.exists() or ready.read_text() != "\n".join(PACKAGES):
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        folder = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        base = sysconfig.get_path("purelib")
        (Path(folder) / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        ready.write_text("\n".join(PACKAGES))
    scripts = ENVIRONMENT / "bin"
    farcall = scripts / "farcall"
    farcall.write_text(f"#!{python}\nimport sys\nfrom farcall.cli import main\nsys.exit(main())\n")
    farcall.chmod(0o755)
    if sys.argv[1:]:
        return subprocess.run(_pytest(python, sys.argv[1:]), cwd=ROOT, check=False).returncode
    return _run_files(python)


def _pytest(python: Path, arguments: Sequence[str]) -> list[str]:
    options = ["-rs", "--durations=0", "-o", "faulthandler_timeout=0"]  # tests have limits of their own
    return [str(python), "-m", "pytest", *options, *arguments]


def _run_files(python: Path) -> int:
    """Run all files of tests, two at a time; returns the first exit status that is not 0."""
    began = time.monotonic()
    statuses = []
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(
                subprocess.run,
                _pytest(python, [f"tests/engines/{name}.py"]),
                cwd=ROOT,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for name in FILES
        ]
        for each in as_completed(running):
            ended = each.result()
            sys.stdout.buffer.write(ended.stdout)
            sys.stdout.flush()
            statuses.append(ended.returncode)
    print(f"{len(FILES)} files of tests in {time.monotonic() - began:.0f} s")
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main())
