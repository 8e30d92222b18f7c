"""The generated reference pages contain all settings, flags, metrics, messages and routes that the code
declares."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

import click

from infra.program_specs import PROGRAM_SPECS
from roostream.cli.http_reference import application_document, http_page
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
class NestedSettings(Settings):
    name: str = setting("", "who")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings(Settings):
    """A settings class with one setting of every kind."""

    wait_ms: int = setting(90_000, "how long", ge=1, le=3_600_000)
    room_bytes: int = setting(64 << 20, "how much")
    mode: Literal["a", "b"] = setting("a", "which")
    names: tuple[str, ...] = setting(help="who may")
    place: Path | None = setting(None, "where")
    login: NestedSettings = setting(factory=NestedSettings, help="a table")


def test_a_setting_has_its_type_default_and_range() -> None:
    declared = {o.key: (o.kind, o.default, o.range, o.help) for o in options(SampleSettings)}
    assert declared == {
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
    assert "| `roostream_worker_slice_ne` | `slice`, `value`, `task` | normalized entropy |" in text
    assert "| `roostream_shard_call_seconds` | `stage` | time to answer a call |" in text
    assert "| `roostream_auditor_actions` | `action` | engagements by action |" in text
    assert "| `roostream_simulator_click_rate` | `order`, `window` |" in text
    assert "| `roostream_simulator_requests_total` |  | simulated requests |" in text
    assert "| `roostream_auditor_model_quality` | `metric`, `of` |" in text
    dashboards = (Path(__file__).resolve().parents[2] / "infra" / "dashboards").glob("*.json")
    shown = {
        n for f in dashboards for n in re.findall(r"\broostream_[a-z0-9_]+", f.read_text(encoding="utf-8"))
    }
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_a_metric_is_listed_once_in_a_program_and_only_where_it_is_declared() -> None:
    sections = metrics_page().split("\n## ")[1:]
    listed = {
        section.split("\n")[0]: re.findall(r"^\| `(\w+)`", section, re.MULTILINE) for section in sections
    }
    assert all(len(names) == len(set(names)) for names in listed.values())
    assert (
        "roostream_shard_rows" in listed["param_server"] and "roostream_shard_rows" not in listed["trainer"]
    )


def test_the_messages_page_contains_the_protobuf_file() -> None:
    assert "message Impression {" in messages_page()


def test_the_messages_page_says_what_readers_in_other_languages_need() -> None:
    page = messages_page()
    for kind, name in ((1, "Impression"), (4, "Sample (a correction)"), (8, "RowDelta"), (10, "Prediction")):
        assert f"| {kind} | {name} |" in page
    for name in ("key_bytes", "sample_id", "bucket_of"):
        assert f"- `{name}`: " in page


def test_the_http_page_has_every_route_with_its_examples_fields_and_errors() -> None:
    document = application_document()
    text = http_page(document)
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert {"/v1/rank", "/v1/engagements", "/v1/explain", "/v1/recommend", "/readyz"} <= set(
        document["paths"]
    )
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            section = sections[f"{method.upper()} {path}"]
            assert operation["summary"] in section
            examples = section.count("```json")
            assert examples == 2 * (method == "post") + (method == "get" and path != "/metrics"), path
            assert all(status in section for status in operation["responses"])
            assert all(f"| {s} |" in sections["Errors"] for s in operation["responses"] if s != "200")
    for name, component in document["components"]["schemas"].items():
        if name == "Id":
            continue
        fields = sections["Types"].split(f"### {name}\n")[1].split("\n### ")[0]
        assert all(f"| `{field}` |" in fields for field in component["properties"])
    links = set(re.findall(r"\(#([a-z_]+)\)", text))
    assert links <= {name.lower() for name in document["components"]["schemas"]} | {"errors"}


def test_the_http_page_says_types_and_limits_in_words() -> None:
    text = http_page(application_document())
    assert "| `candidates` | list of [CandidateRow](#candidaterow)" in text and "1 to 1,000 entries" in text
    assert "| `user_id` | id |" in text and "| `price` | number or null | float32 |" in text
    assert "`unknown_model_version`" in text and "`header_timeout`" in text


def test_the_examples_of_the_openapi_document_have_the_fields_of_their_types() -> None:
    document = application_document()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation["responses"]["200"]["content"].get("application/json")
            if content is None:
                continue
            schema = next(iter(content["schema"].get("anyOf", [content["schema"]])))
            component = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            assert set(component["required"]) <= set(content["example"]) <= set(component["properties"]), path
