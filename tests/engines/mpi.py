"""Real ``mpirun`` of OpenMPI and MPICH, on two nodes."""

from __future__ import annotations

import json
import shutil

import pytest

from rpc.rendezvous.engines import engine_of
from tests.engines.nodes import Nodes, nodes
from tests.support.engine_environments import HYDRA, OPEN_MPI_4

__all__ = ["nodes"]

pytestmark = pytest.mark.timeout(200)

PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
OPEN_MPI = "mpirun.openmpi"
MPICH = "mpiexec.hydra"


def mpirun(nodes: Nodes, kind: str, variables: dict[str, str], slots: int = 2) -> list[str]:
    """The command line up to the program; a wrapper stands for ssh."""
    if shutil.which(kind) is None:
        pytest.skip(f"{kind} is not installed")
    inside = " ".join(nodes.on(0)).replace(nodes.on(0)[1], f"--net=/run/netns/fe-{nodes.tag}-${{host#node}}")
    enter = inside.partition(" sh -c ")[0]
    setting = f'hostname $host; mount --bind {nodes.folder}/hosts /etc/hosts; eval "$*"'
    ssh = nodes.wrapper(
        "rsh",
        f'while [ "${{1#-}}" != "$1" ]; do shift; done; host=$1; export host; shift\n'
        f"exec {enter} bash -c '{setting}' bash \"$@\"",
    )
    variables = {"FARCALL_TOKEN": nodes.environment["FARCALL_TOKEN"]} | variables
    hosts = f"node1:{slots},node2:{slots}"
    if kind == OPEN_MPI:
        given = [part for name, value in variables.items() for part in ("-x", f"{name}={value}")]
        carried = [part for name in ("PATH", "PYTHONPATH", "HOME") for part in ("-x", name)]
        agent = ["--allow-run-as-root", "--mca", "plm_rsh_agent", ssh]
        return [kind, *agent, "--host", hosts, "-n", str(2 * slots), *carried, *given]
    given = [part for name, value in variables.items() for part in ("-genv", name, value)]
    return [kind, "-launcher", "rsh", "-launcher-exec", ssh, "-hosts", hosts, "-n", str(2 * slots), *given]


@pytest.mark.parametrize("kind", [OPEN_MPI, MPICH])
def test_workers_find_their_ranks(nodes: Nodes, kind: str) -> None:
    line = mpirun(nodes, kind, PLACE)
    said = nodes.run(1, *line, "env", f"CHECKPOINT={kind}", "python", "train.py", "3")
    assert "from step 0 with 4 workers" in said
    assert "done" in said


@pytest.mark.parametrize(
    ("kind", "option"), [(OPEN_MPI, "mpirun -x MASTER_ADDR"), (MPICH, "-genv MASTER_ADDR")]
)
def test_without_a_place_to_meet_the_error_shows_the_option(nodes: Nodes, kind: str, option: str) -> None:
    said = nodes.run(1, *mpirun(nodes, kind, {}, 1), "python", "train.py", "3", status=None)
    assert option in said


@pytest.mark.parametrize(("kind", "table"), [(OPEN_MPI, OPEN_MPI_4), (MPICH, HYDRA)])
def test_it_sets_what_the_table_says(nodes: Nodes, kind: str, table: dict[str, str]) -> None:
    show = f"import json, os; json.dump(dict(os.environ), open(str(os.getpid()) + '.{kind}.json', 'w'))"
    nodes.run(1, *mpirun(nodes, kind, {}), "python", "-c", show)
    environs = [json.loads(file.read_text()) for file in nodes.folder.glob(f"*.{kind}.json")]
    placed = sorted((engine_of(each) for each in environs), key=lambda engine: engine.rank if engine else -1)
    assert [engine.local_rank for engine in placed if engine is not None] == [0, 1, 0, 1]
    assert all(set(table) <= set(each) | {"PMIX_ID"} for each in environs)


def test_launchers_under_mpirun_restart_workers(nodes: Nodes) -> None:
    launch = (
        "farcall launch -n 2 --nnodes 2 --node-rank $OMPI_COMM_WORLD_RANK --rdzv node1:29501 --restart 3 "
        "train.py 5"
    )
    said = nodes.run(1, *mpirun(nodes, OPEN_MPI, {}, 1), "env", "CHECKPOINT=c", "sh", "-c", launch)
    assert "from step 0 with 4 workers" in said
    assert "done" in said
