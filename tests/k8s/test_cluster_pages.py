"""The pages of a cluster: every command names what exists, and `roostream` takes its own."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
from click.testing import CliRunner

from infra.program_specs import PROGRAM_SPECS
from roostream.cli.main import cli
from serving.access.bearer_keys import Keyring
from tests.contract.house import ROOT
from tests.k8s.dockerfile import read
from tests.k8s.generate import K8S
from tests.k8s.manifests import build, built, copy_prod, named, of_kind, workloads
from tests.k8s.test_policies import MADE_BY_HAND
from trainer.control.status_page import static_files

Objects = tuple[dict[str, Any], ...]
PAGES = ("cluster.md", "day-two.md")
KNOWN = {"kubectl", "docker", "helm", "roostream", "sed", "until", "REGISTRY=registry.example.org"}
SHORT = {
    "hpa": "HorizontalPodAutoscaler",
    "kafkatopic": "KafkaTopic",
    "statefulset": "StatefulSet",
    "deployment": "Deployment",
}
SHORT |= {"kafka": "Kafka"}
OPTIONAL = {"roostream-objects"}


def page(name: str) -> str:
    return (ROOT / "docs/operations" / name).read_text(encoding="utf-8")


def commands(*pages: str) -> list[str]:
    """Lines of the pages' shell blocks, in order, without what a shell passes over."""
    blocks = [b for name in pages or PAGES for b in re.findall(r"```sh\n(.*?)```", page(name), re.DOTALL)]
    return [
        line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")
    ]


def words(command: str) -> list[str]:
    return shlex.split(re.sub(r"\$\(.*?\)", "made", command))


def ours() -> list[list[str]]:
    """Arguments of `roostream`, also of those that run in a pod."""
    found = []
    for command in commands():
        parts = words(command)
        if "roostream" in parts and (parts[0] == "roostream" or "--" in parts):
            found.append(parts[parts.index("roostream", parts.index("--") if "--" in parts else 0) + 1 :])
    return found


NEEDS_A_CONTAINER = ("exec", "port-forward")
_SERVER, _HERE = "tests/k8s/test_api_server.py", "tests/k8s/test_cluster_pages.py"
_VERSIONS = (_HERE, "test_operators_come_in_the_versions_that_manifests_are_checked_against")
HELD_BY = {
    r"kubectl (?!exec|port-forward)(?!.*(https://|cert-manager))": (
        (_SERVER, "test_the_pages_own_commands_do_what_the_pages_say"),
    ),
    r"kubectl .*https://": (_VERSIONS,),
    r"kubectl .*-n cert-manager": ((_HERE, "test_an_operator_is_there_before_whoever_needs_it"),),
    r"helm ": (
        _VERSIONS,
        (_HERE, "test_a_chart_is_installed_by_its_name_from_its_repository"),
        (_HERE, "test_an_operator_is_there_before_whoever_needs_it"),
    ),
    r"docker build": (
        (_HERE, "test_images_are_built_of_stages_that_there_are"),
        ("tests/k8s/test_image.py", "test_what_each_run_says_is_executed_here"),
    ),
    r"docker push": ((_HERE, "test_what_is_pushed_is_what_was_built"),),
    r"(REGISTRY=|sed )": ((_HERE, "test_the_registry_is_put_into_every_image_of_one_node"),),
    r"kubectl exec": (
        (_HERE, "test_what_kubectl_is_told_of_exists"),
        (_HERE, "test_roostream_takes_its_commands"),
        (_HERE, "test_what_is_executed_in_a_pod_finds_what_it_names_there"),
    ),
    r"kubectl port-forward": ((_HERE, "test_a_forwarded_port_is_one_of_the_pod_that_serves_what_is_asked"),),
    r"until curl": (
        (_HERE, "test_a_forwarded_port_is_one_of_the_pod_that_serves_what_is_asked"),
        (
            "tests/e2e/test_watched_by_prometheus.py",
            "test_a_person_who_waits_for_the_first_trained_sample_in_a_cluster_is_told_of_it",
        ),
    ),
    r"roostream": (
        (_HERE, "test_roostream_takes_its_commands"),
        (_HERE, "test_keys_that_the_page_makes_are_ones_that_serving_takes"),
    ),
}
"""How a command begins → the tests that run it, or where that wants a container or another network, check what it says."""


def runs_on_a_server(command: str) -> bool:
    """Whether an API server without containers can do it."""
    elsewhere = "https://" in command or "cert-manager" in command
    return command.startswith("kubectl") and not elsewhere and words(command)[1] not in NEEDS_A_CONTAINER


def test_every_command_is_held_by_a_test_that_there_is() -> None:
    for command in commands():
        assert sum(re.match(begins, command) is not None for begins in HELD_BY) == 1, command
    assert all(any(re.match(begins, command) for command in commands()) for begins in HELD_BY)
    server = next(iter(HELD_BY))
    assert [c for c in commands() if re.match(server, c)] == [c for c in commands() if runs_on_a_server(c)]
    for file, test in {place for places in HELD_BY.values() for place in places}:
        assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}: {test}"


def test_every_command_begins_with_a_tool_that_is_told() -> None:
    assert commands()
    assert {words(c)[0] for c in commands()} <= KNOWN


def taken(arguments: Sequence[str]) -> click.Context:
    """How `roostream` reads them; nothing is run."""
    context = cli.make_context("roostream", list(arguments))
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize("arguments", ours(), ids=" ".join)
def test_roostream_takes_its_commands(arguments: list[str]) -> None:
    assert taken(arguments).command.name != "roostream"


def test_a_command_that_is_wrong_would_be_found() -> None:
    with pytest.raises(click.UsageError):
        taken(["checkpoint", "rollback", "120", "--stor", "x"])


def test_what_kubectl_is_told_of_exists() -> None:
    there = {(o["kind"], o["metadata"]["name"]) for overlay in ("dev", "prod") for o in built(overlay)}
    for command in (c for c in commands() if c.startswith("kubectl")):
        for kind, name in re.findall(
            r"\b(statefulset|deployment|kafka|hpa|kafkatopic)[/ ]([a-z][\w-]*)", command
        ):
            assert (SHORT[kind], name) in there, command
        for folder in re.findall(r"-k (\S+)", command):
            assert (ROOT / folder / "kustomization.yaml").exists(), command
        for name in re.findall(r"secret generic (\S+)", command):
            assert name in MADE_BY_HAND | OPTIONAL, command
        for pod, number in re.findall(r"-n roostream (roostream-[\w-]+)-(\d+) --", command):
            assert ("StatefulSet", pod) in there and number == "0", command


def test_every_secret_that_nobody_makes_is_made_on_the_page() -> None:
    assert {
        n for c in commands("cluster.md") for n in re.findall(r"secret generic (\S+)", c)
    } == MADE_BY_HAND | OPTIONAL


def test_operators_come_in_the_versions_that_manifests_are_checked_against() -> None:
    table = (ROOT / "tests/k8s/crds/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\| ([\w-]+)/[\w-]+ (?:release-|v)?([\d.]+),", table)
    assert len(set(listed)) == 4
    text = "\n".join(commands("cluster.md"))
    for owner, version in set(listed):
        line = next(
            c for c in text.splitlines() if {"apache": "flink-operator"}.get(owner, owner) in c and "://" in c
        )
        assert version in line, line


def test_images_are_built_of_stages_that_there_are() -> None:
    stages = {i.stage for i in read(ROOT / "infra/image/Dockerfile")}
    tags = []
    for command in (words(c) for c in commands() if c.startswith("docker build")):
        assert (ROOT / command[command.index("-f") + 1]).exists()
        assert command[command.index("--target") + 1] in stages
        tags.append(command[command.index("-t") + 1].replace("$REGISTRY", "registry.example.org"))
    values = (K8S / "overlays/dev/values.yaml").read_text(encoding="utf-8")
    assert tags and all(f"IMAGE: {tag}\n" in values for tag in tags)


def test_what_is_pushed_is_what_was_built() -> None:
    told = [words(command) for command in commands()]
    made = [parts[parts.index("-t") + 1] for parts in told if parts[:2] == ["docker", "build"]]
    assert made == [parts[2] for parts in told if parts[:2] == ["docker", "push"]] and len(made) == 2


def test_the_registry_is_put_into_every_image_of_one_node(tmp_path: Path) -> None:
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


def test_a_chart_is_installed_by_its_name_from_its_repository() -> None:
    kafka, flink = [words(c) for c in commands() if c.startswith("helm")]
    assert kafka[1:3] == [*flink[1:3][:1], kafka[3].rpartition("/")[2]] and kafka[3].startswith("oci://")
    assert kafka[4:6] == ["--version", "1.2.0"] and "watchAnyNamespace=true" in kafka, (
        "else it watches its own namespace alone"
    )
    name, flag, place, chart = flink[2:6]
    assert flag == "--repo" and place.startswith("https://") and chart == name
    assert all(parts[-1] == "--wait" and "--create-namespace" in parts for parts in (kafka, flink))


def test_an_operator_is_there_before_whoever_needs_it() -> None:
    """Flink's asks cert-manager for the certificate of its webhook, without which nobody can make what it looks after."""
    told = commands("cluster.md")
    begins = (
        "helm install strimzi",
        "kubectl apply -f https://github.com/cert-manager",
        "kubectl wait -n cert-manager",
    )
    begins += (
        "helm install flink",
        "kubectl create namespace roostream",
        "kubectl apply --server-side --force-conflicts -k",
    )
    places = [next(i for i, command in enumerate(told) if command.startswith(begin)) for begin in begins]
    assert places == sorted(places)
    own = next(i for i, command in enumerate(told) if "prometheus-operator" in command)
    assert own < told.index("kubectl apply --server-side --force-conflicts -k infra/k8s/overlays/prod")
    assert not {o["apiVersion"] for o in built("dev")} & {"cert-manager.io/v1", "monitoring.coreos.com/v1"}


def test_a_forwarded_port_is_one_of_the_pod_that_serves_what_is_asked() -> None:
    asked = {
        "roostream-worker": "http://127.0.0.1:9090/metrics",
        "roostream-controller": "http://127.0.0.1:9091/",
    }
    forwarded = [
        [word for word in words(c) if word != "&"] for c in commands() if c.startswith("kubectl port-forward")
    ]
    assert {parts[-2].partition("/")[2] for parts in forwarded} == set(asked)
    for parts in forwarded:
        kind, _, name = parts[-2].partition("/")
        here, there = parts[-1].split(":")
        container = named(built("dev"), SHORT[kind], name)["spec"]["template"]["spec"]["containers"][0]
        assert int(there) in {port["containerPort"] for port in container["ports"]}
        address = urlsplit(asked[name])
        assert address.port == int(here) and asked[name] in page("cluster.md")
    assert "/" in static_files(), "of people"


def test_what_is_executed_in_a_pod_finds_what_it_names_there() -> None:
    """Files that it is given are mounted in that pod; a store that it is given is the deployment's."""
    objects = built("prod")
    for command in (words(c) for c in commands() if c.startswith("kubectl exec")):
        place = command[command.index("roostream") + 1]  # behind -n
        name = re.sub(r"-\d+$", "", place.partition("/")[2] or place)
        (workload,) = [w for w in workloads(objects) if w.name == name]
        mounted = {mount["mountPath"] for mount in workload.pod["containers"][0]["volumeMounts"]}
        for option, value in itertools.pairwise(command):
            if option == "--link":
                assert value in mounted, command
            if option == "--store":
                assert value == named(objects, "ConfigMap", "roostream-deployment")["data"]["STORE"], command


def test_a_store_elsewhere_is_where_programs_and_flink_look_for_it(tmp_path: Path) -> None:
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


def test_keys_that_the_page_makes_are_ones_that_serving_takes(
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


def test_one_node_has_room_for_what_one_node_is_told_to_run() -> None:
    """What is asked for, beside what a cluster takes for itself."""
    said = re.search(r"one node with (\d+) CPUs and (\d+) GiB", page("cluster.md"))
    assert said
    cpus, gib = asked_for(built("dev"))
    assert cpus <= int(said[1]) - 1 and gib <= int(said[2]) - 2, (cpus, gib)


def asked_for(objects: Objects) -> tuple[float, float]:
    """(CPUs, GiB) that the scheduler puts aside for these pods."""
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


def test_what_a_roll_out_does_is_told_of_every_program() -> None:
    """But of those that others stand for: simulated users, and rows that belong to serving."""
    table = re.findall(r"^\| ([\w, -]+) \|", page("day-two.md"), re.MULTILINE)
    told = {name.strip() for cell in table for name in cell.split(",")}
    assert {kind.name for kind in PROGRAM_SPECS} - {"simulate"} <= told


def test_links_of_the_pages_lead_somewhere() -> None:
    for name in PAGES:
        for link in re.findall(r"\]\(([^)#]+)", page(name)):
            assert (ROOT / "docs/operations" / link).exists(), f"{name}: {link}"
