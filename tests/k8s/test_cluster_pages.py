"""Code blocks of the cluster's pages: `roostream` accepts its commands, and `kubectl` names objects that
exist.

`test_api_server.py` runs the `kubectl` commands against a real API server.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from roostream.cli.main import cli
from serving.access.bearer_keys import Keyring
from tests.contract.house import ROOT
from tests.k8s.generate import K8S
from tests.k8s.manifests import build, built, copy_prod, named, of_kind, workloads
from tests.k8s.test_policies import MADE_BY_HAND

Objects = tuple[dict[str, Any], ...]
PAGES = ("cluster.md", "day-two.md")
KINDS = {
    "hpa": "HorizontalPodAutoscaler",
    "kafkatopic": "KafkaTopic",
    "statefulset": "StatefulSet",
    "deployment": "Deployment",
    "kafka": "Kafka",
}
OPTIONAL = {"roostream-objects"}
NEEDS_A_CONTAINER = ("exec", "port-forward")


def page(name: str) -> str:
    return (ROOT / "docs/operations" / name).read_text(encoding="utf-8")


def commands(*pages: str) -> list[str]:
    """The lines of the pages' shell blocks without comments, in order."""
    blocks = [b for name in pages or PAGES for b in re.findall(r"```sh\n(.*?)```", page(name), re.DOTALL)]
    return [
        line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")
    ]


def words(command: str) -> list[str]:
    return shlex.split(re.sub(r"\$\(.*?\)", "made", command))


def roostream_arguments() -> list[list[str]]:
    """Arguments of `roostream`, also of commands that run it in a pod."""
    found = []
    for command in commands():
        parts = words(command)
        if "roostream" in parts and (parts[0] == "roostream" or "--" in parts):
            found.append(parts[parts.index("roostream", parts.index("--") if "--" in parts else 0) + 1 :])
    return found


def runs_on_a_server(command: str) -> bool:
    """Whether an API server without containers can run it."""
    elsewhere = "https://" in command or "cert-manager" in command
    return command.startswith("kubectl") and not elsewhere and words(command)[1] not in NEEDS_A_CONTAINER


def parse(arguments: Sequence[str]) -> click.Context:
    """Parse a `roostream` command without running it."""
    context = cli.make_context("roostream", list(arguments))
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


def test_roostream_accepts_its_commands() -> None:
    assert roostream_arguments()
    for arguments in roostream_arguments():
        assert parse(arguments).command.name != "roostream", arguments
    with pytest.raises(click.UsageError):
        parse(["checkpoint", "rollback", "120", "--stor", "x"])


def test_kubectl_names_objects_that_exist() -> None:
    known = {(o["kind"], o["metadata"]["name"]) for overlay in ("dev", "prod") for o in built(overlay)}
    for command in (c for c in commands() if c.startswith("kubectl")):
        for kind, name in re.findall(
            r"\b(statefulset|deployment|kafka|hpa|kafkatopic)[/ ]([a-z][\w-]*)", command
        ):
            assert (KINDS[kind], name) in known, command
        for folder in re.findall(r"-k (\S+)", command):
            assert (ROOT / folder / "kustomization.yaml").exists(), command
        for name in re.findall(r"secret generic (\S+)", command):
            assert name in MADE_BY_HAND | OPTIONAL, command


def test_the_page_creates_every_secret() -> None:
    secrets = {n for c in commands("cluster.md") for n in re.findall(r"secret generic (\S+)", c)}
    assert secrets == MADE_BY_HAND | OPTIONAL


def test_operators_have_the_versions_of_the_checked_definitions() -> None:
    table = (ROOT / "tests/k8s/crds/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\| ([\w-]+)/[\w-]+ (?:release-|v)?([\d.]+),", table)
    assert len(set(listed)) == 4
    text = "\n".join(commands("cluster.md"))
    for owner, version in set(listed):
        line = next(
            c for c in text.splitlines() if {"apache": "flink-operator"}.get(owner, owner) in c and "://" in c
        )
        assert version in line, line


def test_the_registry_is_written_into_every_image(tmp_path: Path) -> None:
    """The page's own lines, with a registry of somebody's own."""
    shutil.copytree(K8S, tmp_path / "infra/k8s")
    shutil.copytree(ROOT / "infra/dashboards", tmp_path / "infra/dashboards")
    (named_so,) = [c for c in commands() if c.startswith("REGISTRY=")]
    (put,) = [c for c in commands() if c.startswith("sed ")]
    lines = named_so.replace("registry.example.org", "shop.example.org:5000/team"), put
    subprocess.run(("sh", "-euc", "\n".join(lines)), cwd=tmp_path, check=True)
    images = {
        c["image"]
        for w in workloads(build(tmp_path / "infra/k8s/overlays/dev"))
        for c in w.containers
        if "image" in c
    }
    assert {image for image in images if "redis" not in image} == {
        "shop.example.org:5000/team/roostream:0.1.0",
        "shop.example.org:5000/team/roostream-flink:0.1.0",
    }


def test_an_external_store_is_used_by_programs_and_flink(tmp_path: Path) -> None:
    """The page's patch at the end of a folder that is a copy of prod's, as the page says to make one."""
    copy_prod(tmp_path)
    (patch,) = re.findall(r"```yaml\n(.*?)```", page("cluster.md"), re.DOTALL)
    with (tmp_path / "kustomization.yaml").open("a", encoding="utf-8") as kustomization:
        kustomization.write(patch)
    objects = build(tmp_path)
    place = "https://store.example.org:9000"
    assert (
        named(objects, "FlinkDeployment", "roostream-joiner")["spec"]["flinkConfiguration"]["s3.endpoint"]
        == place
    )
    told = named(objects, "ConfigMap", "roostream-objects")
    assert told["data"] == {"AWS_ENDPOINT_URL": place, "AWS_REGION": "eu-central-1"}
    readers = [
        workload.name
        for workload in workloads(objects)
        for source in workload.pod["containers"][0].get("envFrom", ())
        if source.get("configMapRef", {}).get("name") == told["metadata"]["name"]
    ]
    assert {
        "roostream-shard",
        "roostream-controller",
        "roostream-worker",
        "roostream-serving",
        "roostream-archiver",
    } <= {*readers}


def test_serving_accepts_the_keys_that_the_page_creates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = [words(c) for c in commands("cluster.md") if c.startswith("roostream")]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, told[1:])
    assert done.exit_code == 0, done.output
    assert "kubectl create secret generic roostream-keys -n roostream --from-file=keys.json" in commands(
        "cluster.md"
    )
    ring = Keyring(tmp_path / "keys.json")
    assert {
        ring.check(b"Bearer " + done.stdout.strip().encode(), scope).name for scope in ("rank", "engage")
    } == {"web"}


def test_the_overlay_for_one_node_fits_on_the_node_of_the_page() -> None:
    """With 1 CPU and 2 GiB left for the cluster itself."""
    said = re.search(r"one node with (\d+) CPUs and (\d+) GiB", page("cluster.md"))
    assert said
    cpus, gib = requested_resources(built("dev"))
    assert cpus <= int(said[1]) - 1 and gib <= int(said[2]) - 2, (cpus, gib)


def requested_resources(objects: Objects) -> tuple[float, float]:
    """(CPUs, GiB) that the scheduler reserves for these pods."""
    found: list[tuple[float, dict[str, Any]]] = []
    for workload in workloads(objects):
        if workload.kind == "FlinkDeployment":
            found += [(1, workload.spec[part]["resource"]) for part in ("jobManager", "taskManager")]
        else:
            count = workload.spec.get("replicas", 1)
            found += [(count, container["resources"]["requests"]) for container in workload.pod["containers"]]
    found += [
        (o["spec"]["replicas"], o["spec"]["resources"]["requests"]) for o in of_kind(objects, "KafkaNodePool")
    ]
    cpus = sum(count * _amount(requests["cpu"]) for count, requests in found)
    return cpus, sum(count * _amount(requests["memory"]) for count, requests in found) / 2**30


def _amount(text: object) -> float:
    """`m` is a thousandth of a CPU in Kubernetes, and a megabyte where Flink's operator reads it."""
    number, unit = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(text)).groups()  # type: ignore[union-attr]
    large = {"": 1.0, "Mi": 2.0**20, "Gi": 2.0**30}
    return float(number) * (large[unit] if unit in large else 2.0**20 if float(number) >= 1000 else 1e-3)
