"""The reference pages of the documentation site, made from the code: settings, commands, metrics, messages.
The HTTP page is made by `http_reference`.

`make docs` calls them (roostream/cli/mkdocs_hooks.py). A program's flag `--show-config` prints its settings.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from infra.options import ROOT, StackOptions
from infra.program_specs import PROGRAM_SPECS
from roostream.runtime.deployment import Deployment
from roostream.schema import ids, schema
from roostream.schema import update_rules as rules
from roostream.schema.counter_declaration import CounterDeclaration
from roostream.schema.settings import range_text, type_text
from roostream.wire import records

_SETTINGS = """\
# Settings

A program reads one TOML file (`roostream worker --config worker.toml`). Environment variables override the
file, and flags override both. A key `x_ms` can be written as `x = "20s"`, and a key `x_bytes` as
`x = "64MiB"`. A dot in a key is a TOML table. An unknown key or a value out of range is an error that names
file and line. An environment variable that sets nothing is an error that names the nearest one. The flag
`--show-config` of a program prints its keys. A text may refer to a variable, `"${NAME}"`, or to a file,
`"${file:/run/secrets/kafka}"`; the value appears in no message and no log. Use such references for passwords
in `--set`, because everybody on the machine can read command lines."""
_SHARED = (
    "All programs of a deployment need the same values. "
    "In a variable's name, PROGRAM is the sub-command in capitals."
)
_METRICS = """\
# Metrics

Each program serves its metrics for Prometheus at `/metrics` of its metrics port. Units are base units
(seconds, bytes). A name that ends in `_total` is a counter since the start of the process. Times are
timestamps, so an age is `time() - metric`."""
_MESSAGES = """\
# Messages

Records in Kafka and the binary form of requests are protobuf messages of this file
(`roostream/wire/roo.proto`)."""
_TYPES = """\
## Types

The first byte of a record in Kafka is its type, the second its version. Requests and answers of serving have
neither."""
_IDS = """\
## Ids and keys

An id is 64 bits. Every hash is xxh3-64 with seed 0."""
_UNITS: dict[str, tuple[tuple[int, str], ...]] = {
    "_ms": ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms"))
}
_UNITS["_bytes"] = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_PROGRAMS = ("joiner", "trainer", "param_server", "serving", "infra", "roostream")


@dataclasses.dataclass(frozen=True)
class Option:
    """One row of the page."""

    key: str
    kind: str
    default: str
    range: str
    help: str


def settings_page() -> str:
    """Every setting of every program, model and schema table."""
    parts = [_SETTINGS, "## Every program", _SHARED, _table(options(Deployment), "ROOSTREAM_PROGRAM")]
    shared = {f.name: f for f in dataclasses.fields(Deployment)}
    for spec in PROGRAM_SPECS:
        settings = spec.settings_class()
        own = [o for o in options(settings) if not _is_shared(o, settings, shared)]
        also = "; plus the keys of every program." if issubclass(settings, Deployment) else "."
        parts += [
            f"## {spec.name}",
            f"{spec.help.removesuffix('.')}{also}",
            _table(own, f"ROOSTREAM_{spec.name}".upper()),
        ]
    for name, text, cls in _files():
        parts += [f"## {name}", text, _table(options(cls))]
    parts += ["## stack", "What `up` and `demo` make programs of.", _table(options(StackOptions))]
    return "\n\n".join(parts) + "\n"


def commands_page(cli: click.Group) -> str:
    """Every command below `cli` with its text, its example and its options."""
    parts = ["# Commands"]
    for path, command in commands(cli):
        text, _, example = inspect.cleandoc(command.help or "").partition("\b\nExample:\n")
        parts += [f"## roostream {path}", text.strip()]
        if example:
            parts.append(f"```\n{inspect.cleandoc(example).strip()}\n```")
        lines = [
            _flag(p)
            for p in command.get_params(click.Context(command))
            if isinstance(p, click.Option) and "--help" not in p.opts
        ]
        if lines:
            parts.append("\n".join((*_HEAD, *lines)))
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Every metric that a file of the programs names, with its help text and labels."""
    parts = [_METRICS]
    for program in _PROGRAMS:
        lines = [
            f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {_cell(help)} |"
            for name, help, labels in sorted(metrics(ROOT / program))
        ]
        if lines:
            parts += [f"## {program}", "\n".join(("| metric | labels | meaning |", "|---|---|---|", *lines))]
    return "\n\n".join(parts) + "\n"


def metrics(folder: Path) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, help text and labels of each metric that is declared below `folder`: a `MetricSpec` in a table of
    names, or a class or function that is called with the name, such as prometheus_client's `Counter`. A
    method that is called with a name reads a metric."""
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    key = constants.get(key.id) if isinstance(key, ast.Name) else key
                    if _is_metric_name(key) and isinstance(value, ast.Call) and _name(value) == "MetricSpec":
                        yield (_text(key), _text(value.args[0]), _labels(value, value.args[1:], constants))
            elif (
                isinstance(node, ast.Call) and _name(node) and node.args[1:] and _is_metric_name(node.args[0])
            ):
                yield (_text(node.args[0]), _text(node.args[1]), _labels(node, node.args[2:], constants))


def _name(call: ast.Call) -> str:
    """The class or function that is called; "" = a method."""
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _labels(call: ast.Call, more: list[ast.expr], constants: dict[str, ast.expr]) -> tuple[str, ...]:
    """The texts in the first list, tuple, name of one, or text among the arguments behind the help text."""
    if _name(call) == "StageHistogram":
        return ("stage",)
    given = [*more, *(keyword.value for keyword in call.keywords if keyword.arg == "labels")]
    for node in (constants.get(one.id, one) if isinstance(one, ast.Name) else one for one in given):
        if isinstance(node, ast.List | ast.Tuple):
            return tuple(map(_text, node.elts))
        if _text(node):
            return (_text(node),)
    return ()


def _is_metric_name(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).startswith("roostream_")


def _text(node: ast.expr | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def messages_page() -> str:
    """The protobuf file, the type bytes of records, and what ids and keys are computed from."""
    proto = (ROOT / "roostream" / "wire" / "roo.proto").read_text(encoding="utf-8")
    types = ["| type | message | versions |", "|---|---|---|"]
    for kind, message in records.TYPES.items():
        name = message.DESCRIPTOR.name + " (a correction)" * (kind == records.CORRECTION)
        versions = "1, or 2 with a checksum" if kind in records.CHECKED else "1"
        types.append(f"| {kind} | {name} | {versions} |")
    functions = (ids.item_id, ids.hash64, ids.key_bytes, ids.sample_id, ids.table_id, ids.bucket_of)
    lines = [f"- `{function.__name__}`: {_summary(function)}" for function in functions]
    parts = (_MESSAGES, _TYPES, "\n".join(types), _IDS, "\n".join(lines), "## The file")
    return "\n\n".join((*parts, f"```protobuf\n{proto.strip()}\n```\n"))


def _summary(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring."""
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def keys(settings: type[Any], stem: str) -> str:
    """Every key of a program's TOML as text: type, default, help and environment variable."""
    lines = []
    for o in options(settings):
        facts = ", ".join(filter(None, (o.kind, o.range, f"default {o.default.strip('*')}")))
        lines.append(f"{o.key}  ({facts})\n    {o.help}\n    {stem}_{o.key.replace('.', '_').upper()}")
    return "\n".join(lines)


def _files() -> Iterator[tuple[str, str, type[Any]]]:
    from roostream.models.build import KINDS as MODEL_KINDS  # imports torch, which a shard's image lacks

    for name, kind in MODEL_KINDS.items():
        yield f"model: {name}", "`model = FILE` of worker and serving.", kind.config
    named = (
        ("tables", schema.Table),
        ("ro, nro", schema.Feature),
        ("counter", CounterDeclaration),
        ("label", schema.Label),
        ("transform", schema.Transform),
    )
    for name, cls in (*named, ("limits", schema.Limits), ("online", schema.Online)):
        yield f"schema: {name}", " ".join((cls.__doc__ or "").partition("\n\n")[0].split()), cls
    for name, rule in rules.RULES.items():
        yield f"schema: rule {name}", "`[tables.NAME.rule]`", rule if isinstance(rule, type) else type(rule)


def _is_shared(option: Option, settings: type[Any], shared: dict[str, Any]) -> bool:
    """Whether the option is declared by Deployment, and by no subclass of it."""
    name = option.key.split(".")[0]
    below = [cls for cls in settings.__mro__ if not issubclass(Deployment, cls)]
    overridden = any(name in inspect.get_annotations(cls) for cls in below)
    return issubclass(settings, Deployment) and name in shared and not overridden


def options(cls: type[Any], prefix: str = "") -> list[Option]:
    """Every setting of a class in declared order; nested settings have dotted keys."""
    out = []
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint, help = hints[f.name], f.metadata.get("help", "")
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            inner = options(hint, f"{prefix}{f.name}.")
            out += inner
            if inner:
                continue
        bounds = f.metadata.get("bounds")
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        allowed = " | ".join(map(str, choices)) or (range_text(bounds))
        out.append(Option(f"{prefix}{f.name}", _unit(f.name) or type_text(hint), _default(f), allowed, help))
    return out


def _unit(name: str) -> str:
    return "duration (ms)" if name.endswith("_ms") else "size (bytes)" if name.endswith("_bytes") else ""


def _default(f: dataclasses.Field[Any]) -> str:
    """The default as written in a file; "required" if there is none."""
    if f.default is not dataclasses.MISSING:
        return _shown(f.name, f.default)
    if f.default_factory is not dataclasses.MISSING:
        return "none" if not f.default_factory() else _shown(f.name, f.default_factory())
    return "**required**"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    for suffix, units in _UNITS.items():
        if name.endswith(suffix) and isinstance(value, int) and value:
            size, unit = next((size, unit) for size, unit in units if value % size == 0)
            return f"{value // size} {unit}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Path):
        return str(value.relative_to(ROOT) if value.is_absolute() else value)
    return "none" if value in ("", None) else str(value).replace(f"{ROOT}/", "")


_HEAD = ("| option | default | meaning |", "|---|---|---|")


def _table(found: list[Option], stem: str = "") -> str:
    """`stem`: prefix of the environment variables; "" = there are none."""
    if not found:
        return "No keys of its own."
    lines = [
        "| key | type | default | allowed | meaning |" + (" environment |" if stem else ""),
        "|---|---|---|---|---|" + ("---|" if stem else ""),
    ]
    for o in found:
        cells = [f"`{o.key}`", o.kind, o.default, o.range, o.help]
        if stem:
            cells.append(f"`{stem}_{o.key.replace('.', '_').upper()}`")
        lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _flag(option: click.Option) -> str:
    default = option.to_info_dict()["default"]
    plain = (
        _shown(f"x_{'ms' if option.type.name == 'duration' else ''}", default)
        if isinstance(default, str | int | float | Path)
        else ""
    )
    shown = "**required**" if option.required else "" if option.is_flag or plain == "none" else plain
    names = ", ".join(f"`{name}`" for name in option.opts)
    return f"| {names} | {_cell(shown)} | {_cell(option.help or '')} |"


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command below `group` with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        elif command is not None:
            yield f"{path}{name}", command
