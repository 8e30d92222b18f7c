"""infra/compose.yaml: by Compose's own schema, and every program in it with settings that it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tomllib import loads as load_toml
from typing import Any

import jsonschema
import pytest
import yaml

from infra.program_specs import PROGRAM_SPECS
from roostream.runtime.program import STOP_S
from roostream.schema.settings import load

INFRA = Path(__file__).resolve().parents[2] / "infra"
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((Path(__file__).with_name("schemas") / "compose-spec.json").read_text(encoding="utf-8"))
PROGRAMS = {kind.name: kind for kind in PROGRAM_SPECS}


def program_of(service: dict[str, Any]) -> str:
    words = [word for word in service.get("command", []) if word != "roostream"]
    return words[0] if words and words[0] in PROGRAMS else ""


OURS = {name: service for name, service in COMPOSE["services"].items() if program_of(service)}


def test_the_compose_file_fits_its_schema() -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(COMPOSE)


def test_the_checkpoint_store_is_created_before_any_program_starts() -> None:
    (creating,) = (
        s for s in COMPOSE["services"].values() if s.get("command", [])[:2] == ["checkpoint", "init"]
    )
    stores = {load_toml(COMPOSE["configs"][name]["content"]).get("store") for name in ("controller", "shard")}
    assert stores == {creating["command"][-1]}
    for name, service in OURS.items():
        assert service["depends_on"]["store"] == {"condition": "service_completed_successfully"}, name


def test_compose_runs_all_programs_of_the_loop() -> None:
    assert {program_of(service) for service in OURS.values()} == {
        "controller",
        "shard",
        "worker",
        "features",
        "serving",
        "joiner",
    }


@pytest.mark.parametrize("name", OURS)
def test_mounted_settings_are_valid(name: str, tmp_path: Path) -> None:
    service, program = OURS[name], program_of(OURS[name])
    mounted = {entry["target"]: entry["source"] for entry in service["configs"]}
    file = tmp_path / f"{program}.toml"
    file.write_text(COMPOSE["configs"][mounted[service["command"][-1]]]["content"])
    settings = load(
        PROGRAMS[program].settings_class(), file, program=program, environ=service.get("environment", {})
    )
    assert getattr(settings, "schema", "") in mounted
    places = [volume.split(":")[1] for volume in service.get("volumes", [])]
    for key in ("home", "store"):
        if (place := str(getattr(settings, key, ""))) and program not in ("features", "joiner"):
            assert place in places, key
    hosts = [getattr(settings, "controller", ""), *getattr(settings, "shards", ())]
    assert {host.partition(":")[0] for host in hosts if isinstance(host, str) and host} <= set(
        COMPOSE["services"]
    )


@pytest.mark.parametrize("name", OURS)
def test_containers_have_time_to_stop_and_no_privileges(name: str) -> None:
    service = OURS[name]
    assert float(service["stop_grace_period"].removesuffix("s")) > STOP_S
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] != "0"


def test_only_serving_is_published_on_loopback() -> None:
    assert {
        name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service
    } == {"serving": ["127.0.0.1:8080:8080"]}


def test_every_image_has_a_version() -> None:
    for service in COMPOSE["services"].values():
        assert re.search(r":\d[\w.]*\}?$", service["image"]), service["image"]
