"""Reference pages contain what the code declares."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

import click

from infra.program_specs import PROGRAM_SPECS
from roostream.cli.main import cli
from roostream.cli.reference_pages import (
    commands,
    commands_page,
    messages_page,
    metrics_page,
    options,
    settings_page,
)
from roostream.schema.settings import Settings, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    name: str = setting("", "who")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Settings):
    """Every kind of setting."""

    wait_ms: int = setting(90_000, "how long", ge=1, le=3_600_000)
    room_bytes: int = setting(64 << 20, "how much")
    mode: Literal["a", "b"] = setting("a", "which")
    names: tuple[str, ...] = setting(help="who may")
    place: Path | None = setting(None, "where")
    login: Inner = setting(factory=Inner, help="a table")


def test_a_setting_has_its_type_default_and_range() -> None:
    found = {o.key: (o.kind, o.default, o.range, o.help) for o in options(Sample)}
    assert found == {
        "wait_ms": ("duration (ms)", "90 s", "1..3600000", "how long"),
        "room_bytes": ("size (bytes)", "64 MiB", "", "how much"),
        "mode": ("choice", "a", "a | b", "which"),
        "names": ("list of text", "**required**", "", "who may"),
        "place": ("path", "none", "", "where"),
        "login.name": ("text", "none", "", "who"),
    }


def test_every_setting_and_every_flag_is_on_the_page() -> None:
    text = settings_page() + commands_page(cli)
    keys = [o.key for kind in PROGRAM_SPECS for o in options(kind.settings_class())]
    parameters = [p for _, command in commands(cli) for p in command.get_params(click.Context(command))]
    flags = [flag for p in parameters if isinstance(p, click.Option) for flag in p.opts]
    assert flags and [x for x in (*keys, *flags) if f"`{x}`" not in text and x not in ("-h", "--help")] == []


def test_every_setting_has_a_help_text() -> None:
    assert [
        f"{kind.name}.{o.key}" for kind in PROGRAM_SPECS for o in options(kind.settings_class()) if not o.help
    ] == []


def test_metrics_are_listed_with_labels_and_meaning() -> None:
    text = metrics_page()
    assert "| `roostream_worker_outcomes_total` | `outcome` | requests by outcome |" in text
    assert "| `roostream_joiner_outputs_total` | `topic`, `reason` | records written |" in text
    dashboards = (Path(__file__).resolve().parents[2] / "infra" / "dashboards").glob("*.json")
    shown = {
        n for f in dashboards for n in re.findall(r"\broostream_[a-z0-9_]+", f.read_text(encoding="utf-8"))
    }
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_messages_are_the_protobuf_file() -> None:
    assert "message Impression {" in messages_page()
