"""Every object fits its schema: Kubernetes' own objects with strict validation, custom resources with a check
that refuses unknown fields."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s.manifests import (
    OVERLAYS,
    build,
    build_custom_overlay,
    build_overlay,
    copy_prod,
    definitions,
    find_object,
    of_kind,
    workloads,
)
from tests.k8s.strict_schema import schema_violations

KUBERNETES = "1.34"


@pytest.fixture(scope="module", params=OVERLAYS)
def objects(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], ...]:
    return (
        build_custom_overlay(tmp_path_factory.mktemp("own"))
        if request.param == "all"
        else build_overlay(request.param)
    )


def violations_of(resource: dict[str, Any]) -> list[str]:
    schema = definitions().get((resource["apiVersion"], resource["kind"]))
    if schema is not None:
        return list(schema_violations(resource, schema))
    try:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [str(error)]
    return []


def test_every_object_fits_its_schema(objects: tuple[dict[str, Any], ...]) -> None:
    found = {f"{o['kind']} {o['metadata']['name']}": w for o in objects if (w := violations_of(o))}
    assert found == {}


def test_names_are_unique(objects: tuple[dict[str, Any], ...]) -> None:
    names = [(o["apiVersion"], o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names))


def test_the_values_config_map_is_not_applied(objects: tuple[dict[str, Any], ...]) -> None:
    assert not [o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"] == "roostream-values"]
    assert "set-by" not in str(objects)


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("StatefulSet", "roostream-shard", ("spec", "replica"), 2),
        ("FlinkDeployment", "roostream-joiner", ("spec", "job", "upgradeMod"), "savepoint"),
        ("FlinkDeployment", "roostream-joiner", ("spec", "job", "upgradeMode"), "sometimes"),
        ("Kafka", "roostream", ("spec", "kafka", "replicas"), 3),  # a field of the API before node pools
        ("KafkaTopic", "samples", ("spec", "partitions"), "4"),
        ("KafkaUser", "roostream-worker", ("spec", "authentication", "type"), "password"),
        ("KafkaNodePool", "broker", ("spec", "roles"), "broker"),
    ],
)
def test_schema_violations_are_found(kind: str, name: str, path: tuple[str, ...], value: object) -> None:
    broken = copy.deepcopy(find_object(build_overlay("prod"), kind, name))
    assert violations_of(broken) == []
    at = broken
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    assert violations_of(broken)


def test_a_custom_overlay_changes_its_values(tmp_path: Path) -> None:
    overlay_objects = build_custom_overlay(tmp_path)
    shard = find_object(overlay_objects, "StatefulSet", "roostream-shard")
    assert shard["spec"]["replicas"] == 3
    assert shard["spec"]["template"]["spec"]["containers"][0]["image"].startswith(
        "shop.example.org/roostream-data@sha256:"
    )
    shards = {e["name"]: e.get("value") for e in shard["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert shards["ROOSTREAM_SHARD_NUM_SHARDS"] == "3"
    assert find_object(overlay_objects, "ConfigMap", "roostream-deployment")["data"]["BUCKETS"] == "32"
    partitions = {
        t["spec"]["topicName"]: t["spec"]["partitions"] for t in of_kind(overlay_objects, "KafkaTopic")
    }
    assert partitions["samples"] == 6 and partitions["dead_letters"] == 1
    assert {o["metadata"].get("namespace", o["metadata"]["name"]) for o in overlay_objects} == {"shop"}


@pytest.mark.parametrize("program", ["shard", "worker", "serving", "compactor"])
def test_the_memory_of_data_dependent_programs_is_a_value_of_the_overlay(
    program: str, tmp_path: Path
) -> None:
    copy_prod(tmp_path)
    values = tmp_path / "values.yaml"
    values_ = yaml.safe_load(values.read_text(encoding="utf-8"))
    values_["data"][f"{program.upper()}_MEMORY"] = "77Gi"
    values.write_text(yaml.safe_dump(values_), encoding="utf-8")
    (found,) = (w for w in workloads(build(tmp_path)) if w.name == f"roostream-{program}")
    resources = found.pod["containers"][0]["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"] == "77Gi"


def test_every_value_of_a_custom_overlay_is_used(tmp_path: Path) -> None:
    """Every value gets a unique text, so that the output shows where it is used."""
    copy_prod(tmp_path)
    kustomization, values = tmp_path / "kustomization.yaml", tmp_path / "values.yaml"
    text = kustomization.read_text(encoding="utf-8")
    with_all = re.sub(r"(  - \S+/components/)values\n", r"\g<0>\1autoscaling\n", text)
    kustomization.write_text(with_all, encoding="utf-8")
    values_ = yaml.safe_load(values.read_text(encoding="utf-8"))
    shapes = {key: re.fullmatch(r"\d+((?:Gi)?)", value) for key, value in values_["data"].items()}
    values_["data"] = {
        key: f"{90001 + number}{shape[1]}" if shape else f"of-{key.lower()}.".replace("_", "-")
        for number, (key, shape) in enumerate(shapes.items())
    }
    values.write_text(yaml.safe_dump(values_), encoding="utf-8")
    text = yaml.safe_dump_all(build(tmp_path))
    assert (
        len(values_["data"]) > 25
        and {key for key, value in values_["data"].items() if value not in text} == set()
    )
    assert re.findall(r".*(?:example\.org|s3://roostream|eu-central-1|set-by).*", text) == []
