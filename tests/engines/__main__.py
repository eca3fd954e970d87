"""Installs the engines by name and runs their tests: ``make test-engines``. Needs root and Debian's packages.

Python packages go into an environment of their own, ``.venv-engines``, over the one of the project.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
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
    tests = [f"tests/engines/{name}.py" for name in ("slurm", "mpi", "kubernetes", "others", "ray_cluster")]
    given = sys.argv[1:] or tests
    return subprocess.run(
        [python, "-m", "pytest", "-rs", "--durations=0", *given], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
