"""Kubernetes, simulated: the manifests against schemas, and their commands in namespaces as pods."""

from __future__ import annotations

import os
import re
import signal
from importlib.util import find_spec
from typing import Any

import pytest

from tests.engines.nodes import ROOT, Nodes, Run, nodes

__all__ = ["nodes"]

pytestmark = pytest.mark.timeout(300)

PAGE = (ROOT / "docs" / "engines" / "kubernetes.md").read_text()
JOB, JOB_SET, TRAIN_JOB = (
    line.replace("train.py 40", "train.py 60") for line in re.findall(r"- (exec farcall launch .*)", PAGE)
)

with_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None or find_spec("kubeflow_trainer_api") is None,
    reason="the schemas are not installed",
)


def manifests() -> dict[str, Any]:
    """The manifests of the page, by kind."""
    import yaml  # type: ignore[import-untyped]

    texts = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return {each["kind"]: each for text in texts for each in yaml.safe_load_all(text)}


@with_schemas
def test_manifests_are_valid_kubernetes() -> None:
    import kubernetes_validate
    import yaml

    found = manifests()
    (policy,) = re.findall(r"`(podFailurePolicy: .*)`", PAGE)
    found["Job"]["spec"] |= yaml.safe_load(policy)
    found["Job"]["spec"]["template"]["spec"]["restartPolicy"] = "Never"
    (replicated,) = found["JobSet"]["spec"]["replicatedJobs"]
    of_set = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
    for each in (*(found[kind] for kind in ("Secret", "Service", "Job")), of_set):
        kubernetes_validate.validate(each, "1.37", strict=True)


@with_schemas
def test_manifests_are_valid_by_kubeflows_models() -> None:
    from kubeflow_trainer_api import models

    found = manifests()
    for kind, model in (
        ("JobSet", models.JobsetV1alpha2JobSet),
        ("TrainJob", models.TrainerV1alpha1TrainJob),
    ):
        assert model.from_dict(found[kind]).to_dict() == found[kind]  # unknown fields would be left out


class Pods:
    """Pods of one job on node3 and node4, with host names of their own."""

    def __init__(self, nodes: Nodes, line: str, names: list[str], checkpoint: str) -> None:
        self._nodes, self._line, self._names, self._checkpoint = nodes, line, names, checkpoint
        hosts = nodes.folder / "hosts"
        known = "".join(f"10.77.0.1{3 + index} {name} {name}.train\n" for index, name in enumerate(names))
        hosts.write_text(hosts.read_text() + known)

    def start(self, index: int) -> Run:
        """Start a pod; its command is process 1."""
        contained = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", self._line]
        kubeflows = {"NNODES": "2", "NODE_RANK": str(index), "MASTER_ADDR": f"{self._names[0]}.train"}
        variables = {
            "JOB_COMPLETION_INDEX": str(index),
            "CHECKPOINT": str(self._nodes.folder / self._checkpoint),
        } | {f"PET_{name}": value for name, value in kubeflows.items()}
        command = self._nodes.on(3 + index, *contained, name=self._names[index])
        return self._nodes.start_command(command, **variables)


def process_one_of(unshare: int) -> int:
    """The process that is 1 in the namespace that ``unshare --fork`` has made."""
    with open(f"/proc/{unshare}/task/{unshare}/children") as children:
        return int(children.read().split()[0])


def test_pods_of_an_indexed_job_resume_after_an_eviction(nodes: Nodes) -> None:
    job = Pods(nodes, JOB, ["train-0", "train-1"], "pods")
    pods = [job.start(0), job.start(1)]
    pods[0].wait_for("from step 0 with 4 workers")
    os.kill(process_one_of(pods[1].process.pid), signal.SIGTERM)
    statuses = [run.end() for run in pods]
    assert 0 not in statuses, [run.said for run in pods]
    pods = [job.start(0), job.start(1)]
    assert [run.end() for run in pods] == [0, 0], [run.said for run in pods]
    assert "with 4 workers" in pods[0].said
    assert "from step 0 " not in pods[0].said


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (JOB_SET, ["train-workers-0-0", "train-workers-0-1"]),
        (TRAIN_JOB, ["train-node-0-0", "train-node-0-1"]),
    ],
    ids=["JobSet", "TrainJob"],
)
def test_the_commands_of_other_manifests_run(nodes: Nodes, line: str, names: list[str]) -> None:
    job = Pods(nodes, line, names, names[0])
    pods = [job.start(0), job.start(1)]
    assert [run.end() for run in pods] == [0, 0], [run.said for run in pods]
    assert "from step 0 with 4 workers" in pods[0].said
    assert "done" in pods[0].said
