"""The dev overlay on a node whose pods really run: all pods get ready, requests are ranked and trained, and
pods are deleted one after the other. Policies are enforced.

Two things differ from a cluster: the broker is not one of Strimzi's, and Flink's own client, not its
operator, creates the joiner's cluster from the pod template and configuration of the FlinkDeployment.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.containers.deployment import NAMESPACE, Deployment, Objects, fit, joiner_of, set_variable
from tests.containers.kubernetes_cluster import KubernetesCluster
from tests.k8s.manifests import build_overlay

pytestmark = [pytest.mark.containers, pytest.mark.timeout(5400)]
NODES = 1


@pytest.fixture(scope="module")
def objects() -> Objects:
    """The overlay, with requests that close after 20 s."""
    changed = copy.deepcopy(build_overlay("dev"))
    fit(changed)
    set_variable(changed, "joiner", "ROOSTREAM_JOINER_WINDOW_MS", "20000")
    return changed


def test_the_dev_overlay_trains_and_serves_on_a_node(
    cluster: KubernetesCluster, objects: Objects, tmp_path: Path
) -> None:
    deployment = Deployment(cluster, tmp_path)
    deployment.make_namespace(objects)
    deployment.make_kafka(objects, partitions=4)
    deployment.make_volumes()
    deployment.make_secret("roostream-redis", serving="one", features="two")
    deployment.apply(objects)
    deployment.deploy_flink(joiner_of(objects))
    cluster.until(lambda: deployment.not_ready() == [], "all pods are ready")
    cluster.until(lambda: deployment.commits() >= 2, "training commits")
    deployment.rank()
    deployment.check_policies()

    for component in ("worker", "shard", "controller", "features", "joiner"):
        before = deployment.commits()
        cluster.kubectl("delete", "pod", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")
        deployment.rank()  # a shard's rows are in serving
        cluster.until(
            lambda: deployment.not_ready() == [], f"all pods are ready after {component} was deleted"
        )
        cluster.until(
            lambda before=before: deployment.commits() > before, f"training commits after {component}"
        )
    cluster.kubectl("rollout", "restart", "-n", NAMESPACE, "deployment/roostream-serving")
    cluster.kubectl("rollout", "status", "-n", NAMESPACE, "deployment/roostream-serving", "--timeout=900s")
    deployment.rank()
    assert not deployment.restarts()
