"""infra/compose.yaml: it fits Compose's schema, every program's settings are valid, and containers have
what they need: commands that exist in the image, folders that the user may write, ports that a service
listens on."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from tomllib import loads as load_toml
from typing import Any

import jsonschema
import pytest
import yaml

from infra.options import demo
from infra.program_specs import PROGRAM_SPECS
from roostream.runtime.flink_rest import pyflink_home
from roostream.runtime.program import STOP_S
from roostream.schema.settings import load
from tests.k8s.dockerfile import read

INFRA = Path(__file__).resolve().parents[2] / "infra"
COMPOSE: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((Path(__file__).with_name("schemas") / "compose-spec.json").read_text(encoding="utf-8"))
PROGRAMS = {spec.name: spec for spec in PROGRAM_SPECS}


def program_of(service: dict[str, Any]) -> str:
    words = [word for word in service.get("command", []) if word != "roostream"]
    return words[0] if words and words[0] in PROGRAMS else ""


def configuration(name: str) -> str:
    """The text of a file that the Compose file mounts."""
    return (INFRA / COMPOSE["configs"][name]["file"]).read_text(encoding="utf-8")


PROGRAM_SERVICES = {name: service for name, service in COMPOSE["services"].items() if program_of(service)}


def test_the_compose_file_fits_its_schema() -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(COMPOSE)


def test_the_checkpoint_store_is_created_before_any_program_starts() -> None:
    (init_service,) = (
        s for s in COMPOSE["services"].values() if s.get("command", [])[:2] == ["checkpoint", "init"]
    )
    stores = {load_toml(configuration(name)).get("store") for name in ("controller", "shard")}
    assert stores == {init_service["command"][-1]}
    for name, service in PROGRAM_SERVICES.items():
        assert service["depends_on"]["store"] == {"condition": "service_completed_successfully"}, name


@pytest.mark.parametrize("name", sorted(demo().overrides.keys() - {"archiver", "compactor"}))
def test_programs_have_the_settings_of_a_local_stack(name: str) -> None:
    settings = load_toml(configuration(name))
    assert settings == {**settings, **demo().overrides[name]}


def test_compose_runs_all_programs_of_the_loop() -> None:
    assert {program_of(service) for service in PROGRAM_SERVICES.values()} == {
        "controller",
        "shard",
        "worker",
        "features",
        "serving",
        "joiner",
    }


@pytest.mark.parametrize("name", PROGRAM_SERVICES)
def test_mounted_settings_are_valid(name: str, tmp_path: Path) -> None:
    service, program = PROGRAM_SERVICES[name], program_of(PROGRAM_SERVICES[name])
    mounted = {entry["target"]: entry["source"] for entry in service["configs"]}
    file = tmp_path / f"{program}.toml"
    file.write_text(configuration(mounted[service["command"][-1]]))
    settings = load(
        PROGRAMS[program].settings_class(), file, program=program, environ=service.get("environment", {})
    )
    assert getattr(settings, "schema", "") in mounted
    mount_points = [volume.split(":")[1] for volume in service.get("volumes", [])]
    for key in ("home", "store"):
        if (path := str(getattr(settings, key, ""))) and program not in ("features", "joiner"):
            assert path in mount_points, key
    hosts = [getattr(settings, "controller", ""), *getattr(settings, "shards", ())]
    assert {host.partition(":")[0] for host in hosts if isinstance(host, str) and host} <= set(
        COMPOSE["services"]
    )


def test_the_joiner_continues_from_the_newest_checkpoint_of_the_job_manager() -> None:
    """The task manager writes the checkpoints."""
    restore = tomllib.loads(configuration("joiner"))["restore"]
    job_manager, joiner = COMPOSE["services"]["flink"], PROGRAM_SERVICES["joiner"]
    for name in ("flink", "task-manager"):
        option = f"execution.checkpointing.dir=file://{restore}/checkpoints"
        assert option in COMPOSE["services"][name]["command"]
        assert {entry["source"] for entry in COMPOSE["services"][name]["configs"]} == {"schema"}, name
    volumes = [
        next(v.split(":")[0] for v in service["volumes"] if v.split(":")[1] == restore)
        for service in (job_manager, joiner)
    ]
    assert volumes[0] == volumes[1]


@pytest.mark.parametrize("name", PROGRAM_SERVICES)
def test_containers_have_time_to_stop_and_no_privileges(name: str) -> None:
    service = PROGRAM_SERVICES[name]
    assert float(service["stop_grace_period"].removesuffix("s")) > STOP_S
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["user"] != "0"


def test_only_serving_is_published_on_loopback() -> None:
    assert {
        name: service["ports"] for name, service in COMPOSE["services"].items() if "ports" in service
    } == {"serving": ["127.0.0.1:${SERVING_PORT:-8080}:8080"]}


def test_read_only_containers_get_configurations_from_files() -> None:
    """Compose refuses others."""
    assert all(set(configuration) == {"file"} for configuration in COMPOSE["configs"].values())


def test_every_image_has_a_version() -> None:
    for service in COMPOSE["services"].values():
        assert re.search(r":\d[\w.]*\}?$", service["image"]), service["image"]


DOCKERFILE = read(INFRA / "image" / "Dockerfile")
UID = re.search(r"useradd --uid (\d+)", " ".join(i.text for i in DOCKERFILE if i.keyword == "RUN"))
KAFKA_VOLUMES = {"/var/lib/kafka/data"}
"""Volumes that the image apache/kafka declares; its user owns them."""


def services_of_our_images() -> dict[str, dict[str, Any]]:
    return {name: s for name, s in COMPOSE["services"].items() if "roostream" in s["image"]}


def mounts(service: dict[str, Any]) -> list[str]:
    """Folders on which the service mounts volumes."""
    return [volume.split(":")[1] for volume in service.get("volumes", ())]


def owned_folders() -> set[str]:
    """Folders that the image gives to its user. A new volume takes the owner of the folder on which it is
    mounted; without such a folder it belongs to root."""
    run_commands = " ".join(i.text for i in DOCKERFILE if i.keyword == "RUN" and i.stage == "base")
    found = re.findall(r"install -d -o roostream -g roostream ([^&]+)", run_commands)
    return {folder for text in found for folder in text.split()}


def test_volumes_belong_to_the_user_of_the_container() -> None:
    for name, service in services_of_our_images().items():
        assert UID and service["user"] == f"{UID[1]}:{UID[1]}", name
        assert set(mounts(service)) <= owned_folders(), name


def test_kafka_keeps_its_records_in_its_volume() -> None:
    kafka = COMPOSE["services"]["kafka"]
    assert kafka["environment"]["KAFKA_LOG_DIRS"] in set(mounts(kafka)) <= KAFKA_VOLUMES


def test_declared_volumes_are_exactly_the_mounted_ones() -> None:
    used = {v.split(":")[0] for s in COMPOSE["services"].values() for v in s.get("volumes", ())}
    assert used == set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", services_of_our_images())
def test_read_only_containers_write_to_mounts_only(name: str) -> None:
    service = services_of_our_images()[name]
    assert service["read_only"]
    writable = {*mounts(service), *(folder.split(":")[0] for folder in service["tmpfs"])}
    variables = " ".join(i.text for i in DOCKERFILE if i.keyword == "ENV" and i.stage == "base")
    cache = re.search(r"NUMBA_CACHE_DIR=(\S+)", variables)
    assert cache and {cache[1], "/tmp"} <= writable
    if name == "kernels":
        assert service["entrypoint"][-1] == cache[1]


def test_flink_can_load_the_library_that_reads_records() -> None:
    """Java unpacks zstd's native library into /tmp, and Docker mounts a tmpfs with noexec by default."""
    for name in ("flink", "task-manager"):
        options = dict(folder.partition(":")[::2] for folder in COMPOSE["services"][name]["tmpfs"])
        assert "exec" in options["/tmp"].split(","), name


def test_commands_of_flinks_image_exist_there() -> None:
    """The image has no entry point. Its scripts are PyFlink's and take options as two words, `-D
    KEY=VALUE`."""
    scripts = {path.name for path in (pyflink_home() / "bin").iterdir()}
    for name, service in services_of_our_images().items():
        if "flink" in service["image"]:
            command = service["command"]
            assert command[0] in scripts | {"roostream"}, name
            if command[0] in scripts:
                assert command[1] == "start-foreground" and len(command) % 2 == 0
                assert set(command[2::2]) == {"-D"} and all("=" in option for option in command[3::2])


def test_a_service_listens_on_every_configured_address() -> None:
    flink = dict(option.split("=", 1) for option in COMPOSE["services"]["flink"]["command"][3::2])
    assert flink["rest.bind-address"] == flink["jobmanager.bind-host"] == "0.0.0.0"
    listens = {("flink", "8081"), ("redis", "6379")}
    advertised = COMPOSE["services"]["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    listens.add(tuple(advertised.removeprefix("PLAINTEXT://").split(":")))
    for name, service in PROGRAM_SERVICES.items():
        mounted = {entry["target"]: entry["source"] for entry in service["configs"]}
        settings = load_toml(configuration(mounted[service["command"][-1]]))
        if "listen" in settings:
            host, _, port = settings["listen"].partition(":")
            assert host == "0.0.0.0", name
            listens.add((name, port))
    texts = " ".join(configuration(name) for name in COMPOSE["configs"] if name != "schema")
    configured = set(re.findall(r'"(?:\w+://)?([\w-]+):(\d+)(?:/\d+)?"', texts)) - {("0", "0")}
    assert len(configured) >= 5 and {address for address in configured if address not in listens} == set()
