"""Shell blocks of the operations pages for a cluster: `roostream` accepts its commands, and `kubectl`
commands name objects that exist.

`test_api_server.py` runs the `kubectl` commands against a real API server.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from roostream.cli.main import cli
from serving.access.bearer_keys import Keyring
from tests.contract.source_tree import ROOT
from tests.k8s.generate import K8S
from tests.k8s.manifests import build, build_overlay, copy_prod, find_object, kafka_pods, of_kind, workloads

Objects = tuple[dict[str, Any], ...]
PAGES = ("install.md", "deploy.md", "upgrade.md", "scale.md", "backup.md", "day-two.md")
NEEDS_A_CONTAINER = ("exec", "port-forward")


def page(name: str) -> str:
    return (ROOT / "docs/operations" / name).read_text(encoding="utf-8")


def commands(*pages: str) -> list[str]:
    """The lines of the pages' shell blocks in order, without comments."""
    blocks = [b for name in pages or PAGES for b in re.findall(r"```sh\n(.*?)```", page(name), re.DOTALL)]
    return [
        line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")
    ]


def words(command: str) -> list[str]:
    return shlex.split(re.sub(r"\$\(.*?\)", "made", command))


def runs_on_a_server(command: str) -> bool:
    """Whether an API server without containers can run the command."""
    needs_more = "https://" in command or "cert-manager" in command
    needs_more = needs_more or "patch persistentvolumeclaim" in command  # needs volumes that can grow
    return command.startswith("kubectl") and not needs_more and words(command)[1] not in NEEDS_A_CONTAINER


def test_a_rollout_does_not_fail_before_the_time_that_the_page_gives_it() -> None:
    found = [re.search(r"rollout status .*deployment/(\S+) --timeout=(\d+)m", c) for c in commands()]
    waits = [match for match in found if match]
    assert waits
    for name, minutes in (match.groups() for match in waits):
        spec = find_object(build_overlay("dev"), "Deployment", name)["spec"]
        assert spec.get("progressDeadlineSeconds", 600) >= 60 * int(minutes), name


def test_the_registry_is_written_into_every_image(tmp_path: Path) -> None:
    """Runs the page's own commands with another registry."""
    shutil.copytree(K8S, tmp_path / "infra/k8s")
    shutil.copytree(ROOT / "infra/dashboards", tmp_path / "infra/dashboards")
    (names,) = [c for c in commands() if c.startswith("REGISTRY=")]
    (replace_command,) = [c for c in commands() if c.startswith("sed ")]
    lines = names.replace("registry.example.org", "shop.example.org:5000/team"), replace_command
    subprocess.run(("sh", "-euc", "\n".join(lines)), cwd=tmp_path, check=True)
    images = {
        c["image"]
        for w in workloads(build(tmp_path / "infra/k8s/overlays/dev"))
        for c in w.containers
        if "image" in c
    }
    assert {image for image in images if "redis" not in image} == {
        "shop.example.org:5000/team/roostream:0.1.0",
        "shop.example.org:5000/team/roostream-data:0.1.0",
        "shop.example.org:5000/team/roostream-flink:0.1.0",
    }


def test_an_external_store_is_used_by_programs_and_flink(tmp_path: Path) -> None:
    """Appends the page's patch to a copy of the overlay prod."""
    copy_prod(tmp_path)
    (patch,) = re.findall(r"```yaml\n(.*?)```", page("deploy.md"), re.DOTALL)
    with (tmp_path / "kustomization.yaml").open("a", encoding="utf-8") as kustomization:
        kustomization.write(patch)
    objects = build(tmp_path)
    endpoint_url = "https://store.example.org:9000"
    assert (
        find_object(objects, "FlinkDeployment", "roostream-joiner")["spec"]["flinkConfiguration"][
            "s3.endpoint"
        ]
        == endpoint_url
    )
    config_map = find_object(objects, "ConfigMap", "roostream-objects")
    assert config_map["data"] == {"AWS_ENDPOINT_URL": endpoint_url, "AWS_REGION": "eu-central-1"}
    users = [
        workload.name
        for workload in workloads(objects)
        for source in workload.pod["containers"][0].get("envFrom", ())
        if source.get("configMapRef", {}).get("name") == config_map["metadata"]["name"]
    ]
    assert {
        "roostream-shard",
        "roostream-controller",
        "roostream-worker",
        "roostream-serving",
        "roostream-archiver",
    } <= {*users}


def test_serving_accepts_the_keys_that_the_page_creates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (words_,) = [words(c) for c in commands("deploy.md") if c.startswith("roostream")]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, words_[1:])
    assert result.exit_code == 0, result.output
    assert "kubectl create secret generic roostream-keys -n roostream --from-file=keys.json" in commands(
        "deploy.md"
    )
    ring = Keyring(tmp_path / "keys.json")
    assert {
        ring.check(b"Bearer " + result.stdout.strip().encode(), scope).name for scope in ("rank", "engage")
    } == {"web"}


def test_the_overlay_for_one_node_fits_on_the_node_of_the_page() -> None:
    """The requests fit with 1 CPU and 2 GiB left for the cluster itself."""
    node_size = re.search(r"one node with (\d+) CPUs and (\d+) GiB", page("deploy.md"))
    assert node_size
    cpus, gib = requested_resources(build_overlay("dev"))
    assert cpus <= int(node_size[1]) - 1 and gib <= int(node_size[2]) - 2, (cpus, gib)


def test_values_that_can_change_at_any_time_touch_no_fixed_field(tmp_path: Path) -> None:
    """An apply that changes a StatefulSet's volume claims is refused as a whole."""
    copy_prod(tmp_path)
    values = tmp_path / "values.yaml"
    text = values.read_text(encoding="utf-8")
    changeable = text[text.index("# Can change at any time") :]
    names = re.findall(r"^  ([A-Z_]+):", changeable[: changeable.index("\n\n")], re.MULTILINE)
    data = yaml.safe_load(text)
    for name in names:
        data["data"][name] = re.sub(r"\d+", lambda found: str(int(found[0]) + 1), data["data"][name])
    values.write_text(yaml.safe_dump(data), encoding="utf-8")
    changed = {o["metadata"]["name"]: o["spec"] for o in of_kind(build(tmp_path), "StatefulSet")}
    assert len(names) >= 6 and "WORKERS" in names
    before = {o["metadata"]["name"]: o["spec"] for o in of_kind(build_overlay("prod"), "StatefulSet")}
    assert changed != before
    for name, spec in before.items():
        for field in spec.keys() - {"replicas", "template", "updateStrategy", "minReadySeconds"}:
            assert changed[name][field] == spec[field], (name, field)


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        ("WORKERS", {"controller"}),
        ("TASK_MANAGERS", {"joiner", "joiner-watch"}),
        ("ARCHIVERS", {"archiver"}),
        ("COMPACTORS", set()),
        ("FEATURE_UPDATERS", {"features", "controller"}),
        ("AUDITORS", {"auditor", "controller"}),
        ("SERVING_LEAST", set()),
        ("SERVING_MOST", set()),
        ("RETENTION_MS", set()),
        ("KAFKA_BROKERS", set()),
    ],
)
def test_another_size_restarts_only_programs_that_read_it(
    name: str, programs: set[str], tmp_path: Path
) -> None:
    """A pod is replaced whenever its template changes, even if only the name of a ConfigMap in it does."""
    copy_prod(tmp_path)
    values = tmp_path / "values.yaml"
    data = yaml.safe_load(values.read_text(encoding="utf-8"))
    data["data"][name] = str(int(data["data"][name]) + 1)
    values.write_text(yaml.safe_dump(data), encoding="utf-8")
    before = {w.name: w.pod for w in workloads(build_overlay("prod"))}
    after = {w.name: w.pod for w in workloads(build(tmp_path))}
    changed = {pod.removeprefix("roostream-") for pod in before if before[pod] != after[pod]}
    assert changed == programs


def requested_resources(objects: Objects) -> tuple[float, float]:
    """(CPUs, GiB) that the scheduler reserves for these pods."""
    found: list[tuple[float, dict[str, Any]]] = []
    for workload in workloads(objects):
        if workload.kind == "FlinkDeployment":
            found += [(1, workload.spec[part]["resource"]) for part in ("jobManager", "taskManager")]
        else:
            count = workload.spec.get("replicas", 1)
            found += [(count, container["resources"]["requests"]) for container in workload.pod["containers"]]
    for workload in kafka_pods(objects):
        count = workload.spec.get("replicas", 1)
        found += [(count, container["resources"]["requests"]) for container in workload.pod["containers"]]
    cpus = sum(count * _amount(requests["cpu"]) for count, requests in found)
    return cpus, sum(count * _amount(requests["memory"]) for count, requests in found) / 2**30


def _amount(text: object) -> float:
    """`m` is a thousandth of a CPU in Kubernetes, and a mebibyte where Flink's operator reads it."""
    number, unit = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(text)).groups()  # type: ignore[union-attr]
    large = {"": 1.0, "Mi": 2.0**20, "Gi": 2.0**30}
    return float(number) * (large[unit] if unit in large else 2.0**20 if float(number) >= 1000 else 1e-3)
