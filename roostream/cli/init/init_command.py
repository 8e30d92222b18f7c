"""`roostream init`: write a folder with a schema, a model, and, without `--from`, a sample log."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from roostream.cli.init.detect_log import Choices, FoundLog, detect_log
from roostream.cli.init.sample_log import sample_lines
from roostream.cli.init.schema_text import MODEL, map_text, schema_text
from roostream.cli.options import MultiValueCommand
from roostream.cli.output import counted, print_sentences, progress_bar
from roostream.errors import ConfigError
from roostream.replay.import_map import ImportMap, check_types
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.settings import SettingError, check_name, from_dict

_ROLES = ("user", "item", "request", "time")


def init_folder(name: str, given: dict[str, Any]) -> None:
    """See the command's help."""
    folder = Path(name)
    try:
        check_name("folder", folder.name or name)
    except SettingError as error:
        raise ConfigError(f"{error}; such as `roostream init shop`") from None
    if given["log"]:
        files, found = _detected(folder, given["log"], given)
        with _new_files(folder) as new:
            for name, text in files.items():
                (new / name).write_text(text, encoding="utf-8")
        print_sentences(found.assumed)
        if not found.is_complete:
            print_sentences([f"only the first rows were read: {found.candidates:,} candidates"])
        print_sentences([f"the action to predict first is {found.click!r}"])
        print_sentences(
            ["a feature that is known only after the list was shown must be removed: it tells the label"]
        )
        _print_next(folder, given["log"], given, found, list(files))
        return
    for flag in ("engagements", "ignore", "click", *_ROLES):
        if given[flag]:
            raise ConfigError(f"--{flag} is about a log of yours; name the log with --from FILE")
    action, second, requests = _questions(given)
    _check_new(folder, ("schema.toml", "model.toml", "log.jsonl"))

    with _new_files(folder) as new:
        with (new / "log.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in counted(sample_lines(requests, action, second), "lines"))
        files, found = _detected(folder, (str(new / "log.jsonl"),), {**given, "click": action})
        for name, text in files.items():
            (new / name).write_text(text, encoding="utf-8")
    _print_next(folder, (str(folder / "log.jsonl"),), given, found, [*files, "log.jsonl"])


def _questions(given: dict[str, Any]) -> tuple[str, str, int]:
    """The answers on a terminal, or the flags and defaults."""
    action, second, requests = given["action"], given["second_action"], given["requests"]
    if sys.stdin.isatty():
        action = action or click.prompt("What shall the model predict? Users of the sample…", default="click")
        if second is None:
            second = click.prompt("A rarer action after it, or none", default="order")
        if requests is None:
            requests = click.prompt("Requests in the sample log", default=6000, type=int)
    requests = 6000 if requests is None else requests
    action, second = action or "click", "order" if second is None else second
    second = "" if second == "none" else second
    if not 100 <= requests <= 1_000_000:
        raise ConfigError(f"--requests: expected 100 to 1,000,000, got {requests:,}; choose such a number")
    for name in filter(None, (action, second)):
        try:
            check_name("action", name)
        except SettingError as error:
            raise ConfigError(str(error)) from None
    if action == second:
        raise ConfigError(f"--second-action: expected another action than {action!r}; or none")
    return action, second, requests


def _check_new(folder: Path, names: Sequence[str]) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: expected a new folder, got a file; choose another name")
    if existing := [name for name in names if (folder / name).exists()]:
        raise ConfigError(
            f"{folder / existing[0]} exists and is not replaced; choose another name than {str(folder)!r}, "
            "or remove the file"
        )


@contextlib.contextmanager
def _new_files(folder: Path) -> Iterator[Path]:
    """A folder for new files, which are moved into `folder` at the end of the block. After an error or Ctrl-C
    none of them stays, so that the command can be repeated."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".init-", dir=folder) as new:
            yield Path(new)
            for file in sorted(Path(new).iterdir()):
                os.rename(file, folder / file.name)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _detected(folder: Path, log: Sequence[str], given: dict[str, Any]) -> tuple[dict[str, str], FoundLog]:
    """The log's features, and the text of each file to write: name → text.

    Raises:
        ConfigError: the log cannot be read or is not clear, or one of the files exists.
    """
    if Path(log[0]).is_dir():
        behaviors = Path(log[0]) / "behaviors.parquet"
        hint = f"an EB-NeRD folder needs no schema: roostream replay ebnerd --behaviors {behaviors}"
        hint = hint if behaviors.is_file() else "name the files in it"
        raise ConfigError(f"{log[0]}: expected files of a log, got a folder; {hint}")
    choices = Choices(
        engagements=given["engagements"],
        ignore=given["ignore"],
        click=given["click"] or "",
        columns={role: given[role] for role in _ROLES if given[role]},
    )
    with progress_bar("reading the log"):
        found = detect_log(log, choices)
    source = ", ".join(log) if given["log"] else str(folder / "log.jsonl")
    files = {"schema.toml": schema_text(folder.name, found, source), "model.toml": MODEL}
    schema = schema_from_dict(tomllib.loads(files["schema.toml"]))  # nothing is written if it is not valid
    if found.types is not None:
        found.map["features"] |= _not_in_table(found, schema)
        files["map.toml"] = map_text(found)
    _check_new(folder, list(files))
    if found.types is not None:
        column_map = from_dict(ImportMap, tomllib.loads(files["map.toml"]))
        try:
            check_types(log[0], column_map, schema, found.types)
        except ConfigError as error:
            raise ConfigError(f"{error}, or leave it out with --ignore COLUMN") from None
    return files, found


def _print_next(
    folder: Path, log: Sequence[str], given: dict[str, Any], found: FoundLog, written: Sequence[str]
) -> None:
    """Print what was written and what to type next."""
    click.echo(
        f"{folder}/: {', '.join(written)}; {found.requests:,} requests with {found.candidates:,} candidates"
    )
    click.echo("next:")
    given["ignore"] = (*given["ignore"], *found.ignored)
    for command in _next(folder, log, given, found.form):
        click.echo(f"  {command}")


def _not_in_table(found: FoundLog, schema: Schema) -> dict[str, str]:
    """The features that Roostream keeps though a column that is left out has their name, each with "", so
    that `import table` does not read it."""
    assert found.types is not None
    used = {*(f.name for f in found.features), *(v for v in found.map.values() if isinstance(v, str))}
    names = {f.name for f in (*schema.ro, *schema.nro)}
    return dict.fromkeys(sorted(names & set(found.types.names) - used), "")


def _next(folder: Path, log: Sequence[str], given: dict[str, Any], form: str) -> list[str]:
    """The commands that use the written files."""
    schema, model = shlex.quote(str(folder / "schema.toml")), shlex.quote(str(folder / "model.toml"))
    files, first = shlex.join(log), []
    if form == "flat":
        imported = shlex.quote(str(folder / "log.jsonl.gz"))
        map_file = shlex.quote(str(folder / "map.toml"))
        first = [f"roostream import table --schema {schema} --map {map_file} --out {imported} {files}"]
        form, files = "jsonl", imported
    inputs = f"--log {files}"
    if form != "jsonl":
        ignored = f" --ignore {shlex.join(given['ignore'])}" if given["ignore"] else ""
        inputs = f"--impressions {files} --engagements {shlex.join(given['engagements'])}{ignored}"
    home, report = shlex.quote(str(folder / "home")), shlex.quote(f"{folder / 'report'}/")
    replay = f"roostream replay {form} --schema {schema} --model {model} {inputs}"
    return [
        *first,
        f"roostream check --schema {schema} {inputs}",
        f"{replay} --engine local --report {report}    # trains in this process",
        f"{replay} --home {home}    # trains on Kafka and Flink, and keeps the model",
        f"roostream up --home {home} --port serving=8080    # serves it and goes on learning",
    ]


init = MultiValueCommand(
    "init",
    params=[
        click.Argument(["name"]),
        click.Option(
            ["--from", "log"], multiple=True, metavar="FILE...", help="a log of yours; default: a sample log"
        ),
        click.Option(
            ["--engagements"], multiple=True, metavar="FILE...", help="tables: files of engagements"
        ),
        click.Option(["--ignore"], multiple=True, metavar="COLUMN...", help="tables: columns to leave out"),
        click.Option(["--click"], default="", metavar="NAME", help="the main action, or its column"),
        *(
            click.Option(
                [f"--{role}"], default="", metavar="COLUMN", help=f"flat table: column of the {role}"
            )
            for role in _ROLES
        ),
        click.Option(["--action"], default="", help="sample log: what users do  [default: click]"),
        click.Option(
            ["--second-action"], help="sample log: a rarer action after it, or none  [default: order]"
        ),
        click.Option(["--requests"], type=int, help="sample log: number of requests  [default: 6000]"),
    ],
    callback=lambda name, **given: init_folder(name, given),
    help="""Write a folder NAME with a commented schema and a model for your log, or with a sample log.

    Without --from, three questions are asked on a terminal; their flags answer them beforehand. With --from,
    the log's columns are found by their names and values, and each conclusion is printed. Files are never
    replaced.

    \b
    Example:
      roostream init shop
      roostream init shop --from monday.jsonl tuesday.jsonl.gz
      roostream init shop --from shown-and-clicked.csv
      roostream init shop --from shown.csv --engagements done.csv
    """,
)
