"""`roostream up | down | reset`: run a local stack, stop it, and delete its home."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import logging.handlers
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from infra.child_logs import last_lines, rotate
from infra.home import FOLDERS, Home
from infra.machine_checks import require_disk
from infra.options import OPTIONS_FILE, StackOptions, load_saved_options, save_options
from infra.options import demo as demo_options
from infra.program_specs import SPECS_BY_NAME, find_spec, possible_instances
from infra.shutdown import MAX_SHUTDOWN_S
from infra.stack import Stack
from roostream.cli.options import (
    NonEmptyPath,
    home_option,
    parse_overrides,
    parse_ports,
    wait_option,
    with_options,
)
from roostream.cli.output import progress_bar
from roostream.cli.program_health import reason, unhealthy_programs
from roostream.errors import ConfigError, SetupError, printable
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import UNFINISHED, FileStore
from roostream.runtime.program import MaskingFormatter, set_on_signals
from roostream.schema.schema_file import load_schema
from serving.feature_log.log import FeatureLog

Programs = Mapping[str, Mapping[str, Any]]
"""The table `programs` of stack.json: name → state, pid, log and so on."""
_UP_LOG_BYTES = 1 << 20
_OTHERS_IN_HOME = (
    *("stack.json", "stack.json.new", OPTIONS_FILE, "simulate.json"),
    *("kafka", "redis", "flink", "warehouse"),
)
_FILES = ("model", "items", "keys_file", "admin_token_file")
_ALWAYS_GIVEN = ("ports", "sets", "schema")


def _count(flag: str, name: str, default: int, help: str) -> Any:
    return click.option(flag, name, type=int, default=default, show_default=True, help=help)


stack_options = with_options(
    home_option,
    click.option(
        "--schema", type=NonEmptyPath(path_type=Path), help="schema TOML; default: that of the demo"
    ),
    _count("--shards", "num_shards", 2, "parameter server shards"),
    _count("--workers", "num_workers", 1, "trainer workers at the start"),
    _count("--serving", "serving_processes", 1, "serving processes, which share one port"),
    _count("--readers", "num_readers", 0, "reader programs, which read a warehouse for the workers"),
    _count("--max-readers", "max_readers", 0, "start up to this many readers while workers wait for data"),
    _count("--feature-updaters", "num_updaters", 1, "feature updaters, which share the partitions"),
    _count("--auditors", "num_auditors", 1, "auditors, which share the partitions"),
    _count("--partitions", "partitions", 4, "partitions of each topic; `roostream topics grow` adds some"),
    _count("--task-managers", "num_task_managers", 1, "task managers of Flink"),
    click.option(
        "--port", "ports", multiple=True, metavar="NAME=PORT", help="use this port, such as serving=8080"
    ),
    click.option(
        "--java", default="", help="path of a java of version 17 or later; default: the bundled runtime"
    ),
    click.option("--kafka", default="", metavar="HOST:PORT", help="use this broker instead of starting one"),
    click.option("--redis", default="", metavar="HOST:PORT", help="use this Redis instead of starting one"),
    click.option(
        "--set", "sets", multiple=True, metavar="PROGRAM.KEY=VALUE", help="set a key of a program's TOML"
    ),
)


def build_options(
    ports: tuple[str, ...],
    sets: tuple[str, ...],
    schema: Path | None,
    base: StackOptions | None = None,
    **others: Any,
) -> StackOptions:
    """Change `base` (default: the demo's options) by what the command line says.

    Raises:
        ConfigError: an option has another form, the schema cannot be read, or a setting is that of a program
            that this stack does not have.
    """
    if schema is not None:
        if not schema.is_file():
            raise ConfigError(f"{schema}: no such file; expected a schema TOML")
        load_schema(schema)  # one clear error now, instead of one from each program
        others["schema"] = schema
    base = base or demo_options()
    merged = {program: dict(table) for program, table in base.overrides.items()}
    for program, table in parse_overrides(sets).items():
        merged.setdefault(program, {}).update(with_absolute_files(table))
    options = dataclasses.replace(base, ports=parse_ports(ports), overrides=merged, **others)
    for program in parse_overrides(sets):
        instances = possible_instances(program, options)
        if program not in (*SPECS_BY_NAME, *instances):
            known = " to ".join(dict.fromkeys((*instances[:1], *instances[-1:]))) or "a program of this stack"
            raise ConfigError(f"--set: expected {known}, got {program!r}, which this stack never starts")
    return options


@click.command()
@stack_options
@click.option("--foreground", is_flag=True, help="stay in the foreground and stop all programs on Ctrl-C")
@wait_option("give up when no further program became ready for this many seconds")
@click.option(
    "--from-warehouse", metavar="URL", help="train a new model from this archive first, then from the stream"
)
def up(home: Path, foreground: bool, wait_s: float, from_warehouse: str | None, **options: Any) -> None:
    """Start a stack in the background, without simulated users.

    In the home of a finished replay, the stack starts with the replay's settings. Exit code 1: a program was
    not ready in time, or training is held; the stack runs on.

    \b
    Example:
      roostream up --home .roostream --schema my_site.toml --port serving=8080
      roostream up --from-warehouse .roostream/warehouse
    """
    if from_warehouse:
        location = absolute_location(from_warehouse)
        options["sets"] = (*options["sets"], f"controller.warehouse={location}")
    place = Home(home)
    if from_warehouse and not foreground and (commit := trained_commit(place)):
        click.echo(
            f"{place.root} has a model (commit {commit}), which is trained on from the stream; a new model "
            "from a warehouse needs another --home",
            err=True,
        )
    base = load_saved_options(place.root)
    if base is None and options["schema"] is None:
        options["schema"] = last_schema(place)
    if base is not None:  # options that were not given keep the value that they had
        source = click.get_current_context().get_parameter_source
        options = {
            name: value
            for name, value in options.items()
            if name in _ALWAYS_GIVEN or source(name) is not ParameterSource.DEFAULT
        }
    chosen = build_options(**options, base=base)
    if not foreground:
        sys.exit(start(home, sys.argv[1:], wait_s))
    stop = stop_on_signals()
    stack = Stack(home, chosen)
    log_to(stack.home)
    with stack:
        check_feature_logs(stack.home.root, chosen.serving_processes)
        if base is not None and options["schema"] is not None:  # the next `up` continues with it
            save_options(place.root, dataclasses.replace(base, schema=chosen.schema.resolve()))
        stack.start(["all"])
        stop.wait()
        print(stack.stop(), flush=True)


def check_feature_logs(home: Path, serving_processes: int) -> None:
    """Check that no serving process beyond this number has left events that Kafka does not have. Call while
    the home is locked.

    Raises:
        SetupError: one has, and nobody would send them.
    """
    for folder in sorted(home.glob("serving-*/log")):
        number = folder.parent.name.removeprefix("serving-")
        if not number.isdecimal() or int(number) < serving_processes or not any(folder.glob("*.seg")):
            continue
        try:
            feature_log = FeatureLog.open(folder)
        except SetupError:  # a process that was started by hand sends it
            continue
        left = len(feature_log.unacknowledged_events())
        feature_log.close()
        if left:
            raise SetupError(
                f"expected at least {int(number) + 1} serving processes, because Kafka does not have {left} "
                f"events of the feature log in {folder} yet, got {serving_processes}; start with "
                f"`--serving {int(number) + 1}` once, or delete that folder to lose them"
            )


def trained_commit(place: Home) -> int:
    """The newest commit of a model that is trained from the stream; 0 = there is none."""
    if not place.store.is_dir():
        return 0
    newest = manifests.newest(FileStore(place.store))
    return newest.manifest.seq if newest and newest.manifest.input is None else 0


def last_schema(place: Home) -> Path | None:
    """The schema file with which a stack was last started in this home; None in a new home.

    Raises:
        ConfigError: the file is gone, or the home does not tell which one it was.
    """
    stack = place.read_stack()
    if stack is None and place.stack_json.exists():
        raise ConfigError(
            f"{place.stack_json}: expected the description of the last stack, got a damaged file; "
            "give --schema"
        )
    last = (stack or {}).get("schema")
    if not last:
        return None
    file = Path(last)
    if not file.is_file():
        raise ConfigError(
            f"{file}: expected the schema of the last `up` in {place.root}, got no file; give --schema"
        )
    return file


def start(home: Path, arguments: Sequence[str], wait_s: float) -> int:
    """Run `roostream up --foreground` in the background and wait until all programs are ready.

    Returns 1 if no further program became ready for `wait_s`, because a busy machine may need a while for
    each, or if training is held.

    Raises:
        SetupError: a program failed, or the stack ended.
    """
    place = Home(home)
    place.check_path()
    require_disk(place.root)
    place.make()
    with place.locked():
        pass  # no stack runs here; else the error names its process
    output = place.log("up")
    rotate(output, _UP_LOG_BYTES)
    with output.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            (sys.executable, "-m", "roostream.cli.main", *arguments, "--foreground"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        return _wait_until_ready(place, process, log_start, wait_s)
    except KeyboardInterrupt:
        click.echo(
            f"the stack goes on starting in the background; `roostream status {place.option}` shows it, "
            f"`roostream down {place.option}` stops it",
            err=True,
        )
        return 1


def _wait_until_ready(place: Home, process: subprocess.Popen[bytes], log_start: int, wait_s: float) -> int:
    output, printed = place.log("up"), set[str]()
    num_settled, grown_s = 0, time.monotonic()
    while True:
        if process.poll() == 0:
            raise SetupError(
                f"the stack was stopped before all programs were ready; `roostream up {place.option}` starts "
                "it again"
            )
        if process.returncode is not None:
            ended = f"the stack ended with exit code {process.returncode}; see {place.log('supervisor')}"
            lines = last_lines(output, 1, since=log_start) or [ended]
            raise SetupError(printable(lines[-1].removeprefix("error: ")))
        stack = place.read_stack()
        programs = stack["programs"] if stack and stack["supervisor_pid"] == process.pid else {}
        for name, entry in programs.items():
            if entry["state"] == "failed":
                raise SetupError(
                    printable(
                        f"{name} cannot run: {reason(entry)}; its log: {entry['log']}; "
                        f"`roostream down {place.option}` stops the other programs"
                    )
                )
        settled = settled_programs(programs)
        for line in (*settled.values(), *restarting_programs(programs)):
            if line not in printed:
                printed.add(line)
                print(printable(line), flush=True)
        if programs and len(settled) == len(programs):
            print("\n".join(describe_endpoints(stack or {})))
            held = [name for name, entry in programs.items() if entry["state"] == "held"]
            if held:
                text = f"training is held, so {', '.join(held)} does not run"
                print(f"{text}; `roostream status {place.option}` says why", file=sys.stderr)
            return 1 if held else 0
        if len(settled) > num_settled:
            num_settled, grown_s = len(settled), time.monotonic()
        if time.monotonic() >= grown_s + wait_s:
            break
        time.sleep(0.25)
    waiting = "; ".join(f"{name}: {text}" for name, text in unhealthy_programs(programs).items())
    print(
        printable(
            f"not all programs are ready, and none became ready for {wait_s:.0f} s: "
            f"{waiting or 'no program was started'}; see `roostream status {place.option}`"
        ),
        file=sys.stderr,
    )
    return 1


def restarting_programs(programs: Programs) -> list[str]:
    """One line for each program that died and is being restarted."""
    return [
        f"{name} died and is restarted: {entry['said']}; its log: {entry['log']}"
        for name, entry in programs.items()
        if entry.get("said") and entry["state"] in ("waiting", "starting")
    ]


def settled_programs(programs: Programs) -> dict[str, str]:
    """One line for each program that is ready, or stopped because training is held."""
    lines = {"ready": "is ready", "held": "is stopped, because training is held; see `roostream status`"}
    return {
        name: f"{name} {lines[entry['state']]}" for name, entry in programs.items() if entry["state"] in lines
    }


def with_absolute_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a program with the paths of existing files made absolute."""
    return {
        key: os.path.abspath(value) if key in _FILES and os.path.isfile(value) else value
        for key, value in settings.items()
    }


def absolute_location(text: str) -> str:
    """A path made absolute, because programs run in another working directory; a URL unchanged."""
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


@click.command()
@home_option
def down(home: Path) -> None:
    """Stop a stack in a fixed order. `up` continues from the committed state.

    \b
    Example:
      roostream down --home .roostream
    """
    place = Home(home)
    stack = place.running_stack()
    os.kill(int(stack["supervisor_pid"]), signal.SIGTERM)
    deadline_s = time.monotonic() + MAX_SHUTDOWN_S
    with progress_bar("stopping"):
        while place.is_locked():
            if time.monotonic() > deadline_s:
                raise SetupError(
                    f"process {stack['supervisor_pid']} did not stop within {MAX_SHUTDOWN_S:.0f} s; see "
                    f"{place.log('supervisor')}"
                )
            time.sleep(0.2)
    print("stopped; `roostream up` continues from the committed state")


@click.command()
@home_option
@click.option("--yes", is_flag=True, help="do not ask for confirmation")
def reset(home: Path, yes: bool) -> None:
    """Delete a stopped stack with its data, checkpoints and logs. Other files in the folder are kept.

    \b
    Example:
      roostream reset --home .roostream --yes
    """
    place = Home(home)
    if not yes:
        click.confirm(f"Delete the stack in {place.root}: all data, checkpoints and logs?", abort=True)
    if not place.root.exists():
        print(f"there is no home {place.root}; nothing to delete")
        return
    if not place.stack_json.exists():
        raise SetupError(
            f"{place.root} has no stack.json, so it is not the home of a stack; nothing was deleted; "
            "give the --home of a stack, or delete the folder yourself"
        )
    place.lock()
    place.end_leftovers()
    entries = [entry for entry in place.root.iterdir() if _is_written_by_stack(entry.name)]
    last = (place.run, place.stack_json)  # the lock, and what tells that this is a home
    for entry in sorted(entries, key=lambda entry: (entry in last, entry == place.stack_json)):
        if entry.is_dir() and not entry.is_symlink():
            _delete_folder(entry)
        else:
            entry.unlink()
    place.unlock()
    if kept := sorted(entry.name for entry in place.root.iterdir() if not os.path.ismount(entry)):
        shown = ", ".join(kept[:5]) + (", …" if len(kept) > 5 else "")
        print(printable(f"deleted the stack in {place.root}; kept {shown}, which no stack has written"))
        return
    with contextlib.suppress(OSError):  # a mount point, or the parent folder may not be written
        place.root.rmdir()
    print(f"deleted {place.root}")


def _delete_folder(folder: Path) -> None:
    """Delete a folder with its content. A mount point, such as the store, stays as an empty folder."""
    try:
        shutil.rmtree(folder)
    except OSError:
        if not os.path.ismount(folder) or any(folder.iterdir()):
            raise


def _is_written_by_stack(name: str) -> bool:
    """Whether a stack, a training or a replay writes an entry of this name into its home."""
    if name in (*FOLDERS, *_OTHERS_IN_HOME) or name.startswith(UNFINISHED):
        return True
    try:
        return bool(find_spec(name))  # the folder of a program, such as shard-0
    except ConfigError:
        return False


def describe_endpoints(stack: Mapping[str, Any]) -> list[str]:
    """Addresses of a running stack, and commands to try."""
    shards = [p["pid"] for n, p in stack["programs"].items() if n.startswith("shard-") and p["pid"]]
    serving = stack["serving"]
    body = '{"user_id": 17, "candidates": [{"item_id": 1}, {"item_id": 2}, {"item_id": 3}]}'
    page = str(stack["programs"].get("controller", {}).get("metrics") or "").removesuffix("metrics")
    return [
        *([f"page        {page}"] if page else []),
        f"API docs    {serving}/docs",
        f"Kafka       {stack['kafka']}",
        f"Flink       {stack['flink']}",
        f"logs        {stack['home']}/logs",
        f"schema      {stack['schema']}",
        f"rank        curl -s {serving}/v1/rank -H 'Content-Type: application/json' -d '{body}'",
        *([f"kill        kill -9 {shards[0]}    # a shard; the stack recovers by itself"] if shards else []),
    ]


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C, `down` or a closed terminal sets. A second signal does not interrupt the
    shutdown."""
    stop = threading.Event()
    set_on_signals(stop, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    return stop


def log_to(home: Home, console: logging.Handler | None = None) -> None:
    """Log to `logs/supervisor.log`, of bounded size, and to `console`."""
    home.make()
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(home.log("supervisor"), maxBytes=4 << 20, backupCount=1)
    ]
    if console is not None:
        handlers.append(console)
    for handler in handlers:
        handler.setFormatter(MaskingFormatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level="INFO", handlers=handlers, force=True)
