"""Generates files for Kubernetes operators from the project's own definitions.

`python -m tests.k8s.generate` writes the files; test_generated_files.py checks that they are current.

roostream/runtime/kafka/topics.py → kafka/topics.yaml; RIGHTS below → kafka/users.yaml; infra/alerts →
monitoring/alerts.yaml; requirements-dev.lock → infra/image/requirements
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from joiner.envelope import OUTPUTS
from roostream.runtime.flink_rest import JOB_NAME
from roostream.runtime.kafka import topics
from roostream.runtime.kafka.topics import TOPICS, TopicSettings
from tests.contract.source_tree import ROOT

K8S = ROOT / "infra" / "k8s"
COPIES = 3
_CORE = ("s3",)
IMAGES = {  # image → extras of pyproject.toml, and single packages of other extras
    "roostream-data": ((*_CORE, "param-server", "warehouse"), ("redis[hiredis]",)),
    "roostream-flink": ((*_CORE, "joiner"), ()),
    "roostream": (
        (
            *(*_CORE, "param-server", "warehouse", "trainer", "torchrec", "serving", "client", "retrieval"),
            *("opentelemetry", "replay"),
        ),
        (),
    ),
}


@dataclasses.dataclass(frozen=True)
class Rights:
    """The rights of one program at Kafka. A `group` that ends with `*` is a prefix."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    sees: tuple[str, ...] = ()  # topics whose ids and ends it may see, but not their records
    group: str = ""
    transactions: str = ""


RIGHTS = {
    "shard": Rights(reads=(topics.ROWS,), writes=(topics.ROWS,), group=f"{topics.ROWS}-shard"),
    "controller": Rights(
        reads=(topics.SAMPLES, topics.CORRECTIONS),
        sees=tuple(t for t in TOPICS if t not in (topics.SAMPLES, topics.CORRECTIONS)),  # it watches all
        group="controller",
    ),
    "worker": Rights(
        reads=(topics.SAMPLES, topics.CORRECTIONS),
        writes=(topics.PREDICTIONS, topics.DEAD_LETTERS),
        sees=(topics.ROWS,),
        group="worker-*",
    ),
    "serving": Rights(reads=(topics.ROWS,), writes=topics.EVENTS, group="serving-rows"),
    "features": Rights(reads=topics.EVENTS, group="features"),
    "auditor": Rights(reads=tuple(t for t in TOPICS if t != topics.ROWS), group="auditor-*"),
    "archiver": Rights(
        reads=(topics.SAMPLES, topics.CORRECTIONS), writes=(topics.DEAD_LETTERS,), group="archiver"
    ),
    "joiner": Rights(reads=topics.EVENTS, writes=OUTPUTS, group=JOB_NAME, transactions=f"{JOB_NAME}*"),
}
HEADS = {
    "kafka/topics.yaml": "# Made from roostream/runtime/kafka/topics.py by "
    "`python -m tests.k8s.generate`; don't edit.",
    "kafka/users.yaml": "# Made by `python -m tests.k8s.generate`; don't edit. "
    "A user's certificate is in the\n# Secret of its name.",
    "monitoring/alerts.yaml": "# Made from infra/alerts by `python -m tests.k8s.generate`; don't edit.",
}


def kafka_topics() -> list[dict[str, Any]]:
    """A KafkaTopic for each topic, with the settings that the protocol needs."""
    found = []
    for topic in TOPICS:
        config = topics.configs(topic, TopicSettings(replication=COPIES))
        spec = {
            "topicName": topic,
            "partitions": topics.partitions_of(topic, topics.DEFAULT_PARTITIONS),
            "replicas": COPIES,
            "config": {key: _number(value) for key, value in sorted(config.items())},
        }
        found.append(_resource("KafkaTopic", topic.replace("_", "-"), spec))
    return found


def kafka_users() -> list[dict[str, Any]]:
    """A KafkaUser for each program that reads or writes topics."""
    users = []
    for program, rights in RIGHTS.items():
        acls = [_acl("topic", topic, "Read", "Describe", "DescribeConfigs") for topic in rights.reads]
        acls += [_acl("topic", topic, "Write", "Describe", "DescribeConfigs") for topic in rights.writes]
        acls += [_acl("topic", topic, "Describe", "DescribeConfigs") for topic in rights.sees]
        acls += [_acl("group", rights.group, "Read", "Describe")] if rights.group else []
        acls += (
            [_acl("transactionalId", rights.transactions, "Write", "Describe")] if rights.transactions else []
        )
        spec = {"authentication": {"type": "tls"}, "authorization": {"type": "simple", "acls": acls}}
        users.append(_resource("KafkaUser", f"roostream-{program}", spec))
    return users


def prometheus_rules() -> list[dict[str, Any]]:
    rules = yaml.safe_load((ROOT / "infra/alerts/roostream.rules.yml").read_text(encoding="utf-8"))
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "roostream"},
            "spec": {"groups": rules["groups"]},
        }
    ]


def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {"strimzi.io/cluster": "roostream"}
    return {
        "apiVersion": "kafka.strimzi.io/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _number(text: str) -> int | str:
    """An integer if a JSON number holds it exactly, else the text."""
    return int(text) if text.lstrip("-").isdecimal() and abs(int(text)) < 1 << 53 else text


def _acl(kind: str, name: str, *operations: str) -> dict[str, Any]:
    resource: dict[str, Any] = {"type": kind, "name": name.removesuffix("*")}
    resource["patternType"] = "prefix" if name.endswith("*") else "literal"
    return {"resource": resource, "operations": list(operations), "host": "*"}


def contents() -> dict[Path, str]:
    """Every generated file with its text."""
    documents_by_file = {
        "kafka/topics.yaml": kafka_topics(),
        "kafka/users.yaml": kafka_users(),
        "monitoring/alerts.yaml": prometheus_rules(),
    }
    texts = {
        K8S / name: f"{HEADS[name]}\n{_text(documents)}" for name, documents in documents_by_file.items()
    }
    locked = {ROOT / f"infra/image/requirements/{name}.txt": locked_for_image(name) for name in IMAGES}
    return {**texts, **locked}


def packages_of_image(image: str) -> set[str]:
    """The packages that the programs of an image need: those of the image's extras, single packages of other
    extras, and the build requirements, with which images install the project."""
    extras, packages = IMAGES[image]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return packages_of(extras, *project["build-system"]["requires"], *packages)


def packages_of(extras: Iterable[str], *others: str) -> set[str]:
    """The packages of the project with these extras, and their dependencies, as they are installed here from
    the lock file, on the images' version of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    requirements_of_extra = project["project"]["optional-dependencies"]
    wanted = [
        *project["project"]["dependencies"],
        *others,
        *(line for e in extras for line in requirements_of_extra[e]),
    ]
    excluded = set(project["tool"]["uv"]["exclude-dependencies"])
    dockerfile = (ROOT / "infra/image/Dockerfile").read_text(encoding="utf-8")
    (python,) = set(re.findall(r"^FROM \S+/python:([\d.]+)", dockerfile, re.MULTILINE))
    environment = {"python_full_version": python}  # of the images, whatever this interpreter is
    waiting, found = [Requirement(line) for line in wanted], set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            package = canonicalize_name(requirement.name), extra
            if package in found or package[0] in excluded:
                continue
            found.add(package)
            needed = map(Requirement, importlib.metadata.distribution(package[0]).requires or ())
            waiting += [
                n for n in needed if n.marker is None or n.marker.evaluate(environment | {"extra": extra})
            ]
    return {name for name, _ in found}


def locked_for_image(image: str) -> str:
    """The entries of requirements-dev.lock for `packages_of_image`."""
    names = packages_of_image(image)
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements-dev.lock").read_text(encoding="utf-8").strip())
    kept = [entry for entry in entries if canonicalize_name(entry.partition("==")[0]) in names]
    return (
        "# Made from requirements-dev.lock by `python -m tests.k8s.generate`; don't edit.\n"
        + "\n".join(kept)
        + "\n"
    )


def _text(documents: list[dict[str, Any]]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=160)


if __name__ == "__main__":
    for path, text in contents().items():
        path.write_text(text, encoding="utf-8")
