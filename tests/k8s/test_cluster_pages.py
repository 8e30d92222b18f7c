"""The pages of a cluster: every command names what exists, and `roostream` takes its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from types import SimpleNamespace
from urllib.parse import urlsplit

import click
import pytest

from command.main import cli
from infra.kinds import KINDS
from tests.contract.house import ROOT
from tests.k8s.dockerfile import read
from tests.k8s.generate import K8S
from tests.k8s.manifests import built, named
from tests.k8s.test_policies import MADE_BY_HAND
from trainer.control.page import StatusPage

PAGES = ("cluster.md", "day-two.md")
KNOWN = {"kubectl", "docker", "helm", "curl", "roostream"}
SHORT = {"hpa": "HorizontalPodAutoscaler", "kafkatopic": "KafkaTopic", "statefulset": "StatefulSet", "deployment": "Deployment"}
SHORT |= {"kafka": "Kafka"}
OPTIONAL = {"roostream-objects"}


def page(name: str) -> str:
    return (ROOT / "docs/operations" / name).read_text(encoding="utf-8")


def commands(*pages: str) -> list[str]:
    """Lines of the pages' shell blocks, in order."""
    blocks = [b for name in pages or PAGES for b in re.findall(r"```sh\n(.*?)```", page(name), re.DOTALL)]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


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
HELD_BY = {
    r"kubectl (?!exec|port-forward)(?!.*https://)": ((_SERVER, "test_the_pages_own_commands_do_what_the_pages_say"),),
    r"kubectl .*https://": ((_HERE, "test_operators_come_in_the_versions_that_manifests_are_checked_against"),),
    r"helm .*https://": (
        (_HERE, "test_operators_come_in_the_versions_that_manifests_are_checked_against"),
        (_HERE, "test_a_chart_is_installed_by_its_name_from_its_repository"),
    ),
    r"docker build": (
        (_HERE, "test_images_are_built_of_stages_that_there_are"),
        ("tests/k8s/test_image.py", "test_what_each_run_says_is_executed_here"),
    ),
    r"docker push": ((_HERE, "test_what_is_pushed_is_what_was_built"),),
    r"kubectl exec": ((_HERE, "test_what_kubectl_is_told_of_exists"), (_HERE, "test_roostream_takes_its_commands")),
    r"(kubectl port-forward|curl)": ((_HERE, "test_the_controllers_page_is_where_the_page_of_a_cluster_asks_for_it"),),
    r"roostream": ((_HERE, "test_roostream_takes_its_commands"),),
}
"""How a command begins → the tests that run it, or where that wants a container or another network, check what it says."""


def runs_on_a_server(command: str) -> bool:
    """Whether an API server without containers can do it."""
    return command.startswith("kubectl") and "https://" not in command and words(command)[1] not in NEEDS_A_CONTAINER


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
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
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
        for kind, name in re.findall(r"\b(statefulset|deployment|kafka|hpa|kafkatopic)[/ ]([a-z][\w-]*)", command):
            assert (SHORT[kind], name) in there, command
        for folder in re.findall(r"-k (\S+)", command):
            assert (ROOT / folder / "kustomization.yaml").exists(), command
        for name in re.findall(r"secret generic (\S+)", command):
            assert name in MADE_BY_HAND | OPTIONAL, command
        for pod, number in re.findall(r"-n roostream (roostream-[\w-]+)-(\d+) --", command):
            assert ("StatefulSet", pod) in there and number == "0", command


def test_every_secret_that_nobody_makes_is_made_on_the_page() -> None:
    assert {n for c in commands("cluster.md") for n in re.findall(r"secret generic (\S+)", c)} == MADE_BY_HAND | OPTIONAL


def test_operators_come_in_the_versions_that_manifests_are_checked_against() -> None:
    table = (ROOT / "tests/k8s/crds/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\| ([\w-]+)/[\w-]+ (?:release-|v)?([\d.]+),", table)
    assert len(set(listed)) == 4
    text = "\n".join(commands("cluster.md"))
    for owner, version in set(listed):
        line = next(c for c in text.splitlines() if {"apache": "flink-operator"}.get(owner, owner) in c and "http" in c)
        assert version in line, line


def test_images_are_built_of_stages_that_there_are() -> None:
    stages = {i.stage for i in read(ROOT / "infra/image/Dockerfile")}
    tags = []
    for command in (words(c) for c in commands() if c.startswith("docker build")):
        assert (ROOT / command[command.index("-f") + 1]).exists()
        assert command[command.index("--target") + 1] in stages
        tags.append(command[command.index("-t") + 1])
    values = (K8S / "overlays/dev/values.yaml").read_text(encoding="utf-8")
    assert tags and all(f"IMAGE: {tag}\n" in values for tag in tags)


def test_what_is_pushed_is_what_was_built() -> None:
    told = [words(command) for command in commands()]
    made = [parts[parts.index("-t") + 1] for parts in told if parts[:2] == ["docker", "build"]]
    assert made == [parts[2] for parts in told if parts[:2] == ["docker", "push"]] and len(made) == 2


def test_a_chart_is_installed_by_its_name_from_its_repository() -> None:
    (helm,) = [words(c) for c in commands() if c.startswith("helm")]
    name, flag, place, chart, *options = helm[2:]
    assert helm[1] == "install" and flag == "--repo" and place.startswith("https://") and chart == name
    assert options == ["--namespace", "flink-operator", "--create-namespace"]


def test_the_controllers_page_is_where_the_page_of_a_cluster_asks_for_it() -> None:
    (forward,), (curl,) = ([words(c) for c in commands() if c.startswith(tool)] for tool in ("kubectl port-forward", "curl"))
    here, there = forward[-1].split(":")
    controller = named(built("dev"), "Deployment", "roostream-controller")["spec"]["template"]["spec"]["containers"][0]
    assert int(there) in {port["containerPort"] for port in controller["ports"]}
    address = urlsplit(curl[-1])
    assert (address.scheme, address.netloc) == ("http", f"127.0.0.1:{here}")
    assert address.path in StatusPage.answers(SimpleNamespace(status=dict, history=dict))  # type: ignore[arg-type]


def test_what_a_roll_out_does_is_told_of_every_program() -> None:
    """But of those that others stand for: simulated users, and rows that belong to serving."""
    table = re.findall(r"^\| ([\w, -]+) \|", page("day-two.md"), re.MULTILINE)
    told = {name.strip() for cell in table for name in cell.split(",")}
    assert {kind.name for kind in KINDS} - {"simulate", "serving-rows"} <= told


def test_links_of_the_pages_lead_somewhere() -> None:
    for name in PAGES:
        for link in re.findall(r"\]\(([^)#]+)", page(name)):
            assert (ROOT / "docs/operations" / link).exists(), f"{name}: {link}"
