"""systemd units for machines without an orchestrator: one per program, valid, and consistent with the
programs' settings and limits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.program_specs import PROGRAM_SPECS, SIMULATE
from roostream.runtime.program import HELD_CODE, REFUSED_CODE, STOP_S
from roostream.schema.settings import environment_variables, load

UNITS = Path(__file__).resolve().parents[2] / "infra" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
PROGRAMS = {spec.name: spec for spec in PROGRAM_SPECS if spec.name != SIMULATE}


def read(unit: Path) -> dict[str, list[str]]:
    """Key → values, in the order of the lines, over all sections of the unit."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def program_of(unit: Path) -> str:
    return unit.stem.removeprefix("roostream-").removesuffix("@")


def test_every_program_has_a_unit_and_every_unit_a_program() -> None:
    assert sorted(program_of(unit) for unit in SERVICES) == sorted(PROGRAMS)


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_a_unit_starts_its_program_with_time_to_stop(unit: Path) -> None:
    unit_settings = read(unit)
    program = program_of(unit)
    assert unit_settings["ExecStart"] == [
        f"/opt/roostream/bin/roostream {program} --config /etc/roostream/{program}.toml"
    ]
    assert STOP_S < float(unit_settings["TimeoutStopSec"][0].removesuffix("s")) <= STOP_S + 10
    assert unit_settings["RestartPreventExitStatus"] == [f"{REFUSED_CODE} {HELD_CODE}"] and unit_settings[
        "Restart"
    ] == ["always"]
    assert (
        unit_settings["User"] == ["roostream"]
        and unit_settings["NoNewPrivileges"] == ["true"]
        and unit_settings["ProtectSystem"] == ["strict"]
    )
    assert unit_settings["WantedBy"] == ["roostream.target"] and unit_settings["PartOf"] == [
        "roostream.target"
    ]


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_a_program_starts_once_the_clock_is_right(unit: Path) -> None:
    """Events with the time before the correction would be too late for the join, and so be lost."""
    assert "time-sync.target" in read(unit)["After"][0].split()


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.stem)
def test_environment_variables_of_units_are_settings(unit: Path) -> None:
    unit_settings, program = read(unit), program_of(unit)
    words = [word.partition("=") for line in unit_settings["Environment"] for word in line.split()]
    program_variables = {name: value for name, _, value in words if name.startswith("ROOSTREAM_")}
    assert set(program_variables) <= set(environment_variables(PROGRAMS[program].settings_class(), program))
    for name, value in program_variables.items():
        if name.endswith("_HOME"):
            assert value.removeprefix("/var/lib/") in unit_settings["StateDirectory"]


def instance(unit: Path, number: int) -> dict[str, str]:
    """The environment of one instance of a template unit."""
    words = " ".join(read(unit)["Environment"]).replace("%i", str(number)).split()
    return dict(word.split("=", 1) for word in words)


def test_instances_on_one_machine_share_no_home_port_or_address(tmp_path: Path) -> None:
    """All instances use one settings file, with the address as docs/operations/deploy.md writes it."""
    page = (UNITS.parents[1] / "docs/operations/deploy.md").read_text(encoding="utf-8")
    listen = re.search(r'`(listen = "[^`]+")` in `shard.toml`', page)
    assert listen
    file = tmp_path / "shard.toml"
    file.write_text(
        f'{listen[1]}\nnum_shards = 10\ncontroller = "10.0.0.4:7000"\nbootstrap = "k:9092"\ninsecure = true\n'
    )
    used: list[str] = []
    for unit in UNITS.glob("*@.service"):
        program = program_of(unit)
        for number in range(10):
            environment = instance(unit, number)
            name = f"ROOSTREAM_{program.upper()}"
            used.append(environment[f"{name}_METRICS_PORT"])
            if "StateDirectory" in read(unit):
                used.append(environment[f"{name}_HOME"])
            if program == "shard":
                shard_environment = environment | {
                    f"{name}_SCHEMA": str(file),
                    f"{name}_STORE": str(tmp_path),
                }
                settings = load(
                    PROGRAMS[program].settings_class(), file, program=program, environ=shard_environment
                )
                used.append(str(getattr(settings, "listen")))  # noqa: B009 (the class is that of any program)
                assert str(getattr(settings, "metrics_port")) == environment[f"{name}_METRICS_PORT"]  # noqa: B009
    assert len(used) == 100 and len(set(used)) == len(used)


_TWO_WORKERS = """
import threading
import torch
from trainer.process_group import GroupSpec, TorchRendezvous
places = [TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=20.0) for _ in range(2)]
groups = [place.join(GroupSpec(1, i, 2, places[0].address)) for i, place in enumerate(places)]
sums = [torch.ones(1, dtype=torch.float64) for _ in groups]
threads = [threading.Thread(target=group.sum, args=(one,)) for group, one in zip(groups, sums)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print([one.item() for one in sums])
"""


def test_workers_can_connect_with_the_address_families_of_their_unit() -> None:
    """gloo looks up the interface of its address with a netlink socket."""
    (families,) = read(UNITS / "roostream-worker@.service")["RestrictAddressFamilies"]
    limited = (sys.executable, str(Path(__file__).with_name("address_families.py")))
    command = (*limited, families, sys.executable, "-c", _TWO_WORKERS)
    completed = subprocess.run(
        command, cwd=UNITS.parents[1], capture_output=True, text=True, check=False, timeout=100
    )
    assert completed.stdout == "[2.0, 2.0]\n", completed.stderr[-2000:]


def test_units_wait_for_existing_units() -> None:
    names = {unit.name for unit in UNITS.iterdir()}
    for unit in SERVICES:
        assert set(re.findall(r"roostream[\w@.-]*", " ".join(read(unit)["After"]))) <= names


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd is not installed; only the tests above check the units")
    for unit in UNITS.iterdir():
        text = unit.read_text().replace(
            "/opt/roostream/bin/roostream ", f"{sys.executable} -m roostream.cli.main "
        )
        (tmp_path / unit.name.replace("@.", "@.")).write_text(
            text.replace("User=roostream\nGroup=roostream\n", "")
        )
    files = [str(tmp_path / unit.name.replace("@.", "@0.")) for unit in UNITS.iterdir()]
    for unit in UNITS.glob("*@.service"):
        (tmp_path / unit.name.replace("@.", "@0.")).symlink_to(tmp_path / unit.name)
    completed = subprocess.run(
        (verify, "verify", "--man=no", "--recursive-errors=no", *files),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    problems = [line for line in completed.stderr.splitlines() if "roostream" in line]
    assert not problems and completed.returncode == 0, completed.stderr
