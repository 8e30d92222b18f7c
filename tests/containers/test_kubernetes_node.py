"""The dev overlay on a node whose pods really run: all pods get ready, requests are ranked and trained, and
pods are deleted one after the other.

Two things differ from a cluster: Kafka is no pod, and Flink's own client, not its operator, creates the
joiner's cluster from the pod template and configuration of the FlinkDeployment.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.containers.deployment import NAMESPACE, Deployment, Objects, fit, joiner_of, set_variable
from tests.containers.kubernetes_node import KubernetesNode
from tests.k8s.manifests import build_overlay

pytestmark = [pytest.mark.containers, pytest.mark.timeout(5400)]


@pytest.fixture(scope="module")
def objects() -> Objects:
    """The overlay, with requests that close after 20 s."""
    changed = copy.deepcopy(build_overlay("dev"))
    fit(changed)
    set_variable(changed, "joiner", "ROOSTREAM_JOINER_WINDOW_MS", "20000")
    return changed


def test_the_dev_overlay_trains_and_serves_on_a_node(
    node: KubernetesNode, objects: Objects, tmp_path: Path
) -> None:
    deployment = Deployment(node, tmp_path)
    deployment.make_namespace(objects)
    deployment.make_kafka(objects, partitions=4)
    deployment.make_volumes()
    deployment.make_secret("roostream-redis", serving="one", features="two")
    applied = node.apply(objects)
    assert applied.returncode == 0, applied.stderr
    deployment.deploy_flink(joiner_of(objects))
    node.until(lambda: deployment.not_ready() == [], "all pods are ready")
    node.until(lambda: deployment.commits() >= 2, "training commits")
    deployment.rank()

    for component in ("worker", "shard", "controller", "features", "joiner"):
        before = deployment.commits()
        node.kubectl("delete", "pod", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")
        deployment.rank()  # a shard's rows are in serving
        node.until(lambda: deployment.not_ready() == [], f"all pods are ready after {component} was deleted")
        node.until(lambda before=before: deployment.commits() > before, f"training commits after {component}")
    node.kubectl("rollout", "restart", "-n", NAMESPACE, "deployment/roostream-serving")
    node.kubectl("rollout", "status", "-n", NAMESPACE, "deployment/roostream-serving", "--timeout=900s")
    deployment.rank()
    assert not deployment.restarts()
