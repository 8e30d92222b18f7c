"""The command line: every command has a help text, and every mistake of a user is reported in one
sentence."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from infra.options import ROOT
from roostream.cli import reference_pages
from roostream.cli.main import SECTIONS, cli, main
from roostream.errors import SetupError

COMMANDS = {tuple(path.split()): command for path, command in reference_pages.commands(cli)}
"""Every command that is not a group, by the words of its path."""


def test_every_command_and_group_helps_with_an_example() -> None:
    for words in sorted({leaf[:n] for leaf in COMMANDS for n in range(len(leaf) + 1)}):
        result = CliRunner().invoke(cli, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "roostream" in result.output.partition("Example:\n")[2], words


def test_the_help_lists_the_commands_of_each_section_once() -> None:
    output = CliRunner().invoke(cli, ["--help"]).output
    listed = re.findall(r"^  ([a-z-]+) ", output.split("Start:")[1], re.MULTILINE)
    assert listed == [name for names in SECTIONS.values() for name in names]
    hidden = {"bench", "next-item", "prepare"}
    assert set(listed) | hidden == {words[0] for words in COMMANDS} and len(listed) == len(set(listed))


def test_no_help_names_a_path_of_this_machine() -> None:
    for words in sorted(COMMANDS):
        output = CliRunner().invoke(cli, [*words, "--help"], terminal_width=1000).output
        assert str(ROOT) not in output, words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_the_command_for_words(shell: str) -> None:
    script = CliRunner().invoke(cli, ["completion", shell]).output
    assert f"{shell}_complete" in script
    words = CliRunner().invoke(
        cli,
        [],
        env={
            "_ROOSTREAM_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": "roostream sta",
            "COMP_CWORD": "sta" if shell == "fish" else "1",
        },
        prog_name="roostream",
    )
    assert "status" in words.output


@pytest.fixture
def roostream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """A function that runs the console entry point in a temporary directory and returns exit code and
    stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["roostream", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(str(ended.value.code)), capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("worker", "--config", "no.toml"), "error: no.toml: no such file; check the path"),
        (("status", "--home", "no-home"), "roostream up"),
        (("down", "--home", "no-home"), "roostream up"),
        (("up", "--home", "h", "--port", "servng=1"), "did you mean 'serving'"),
        (("up", "--home", "h", "--set", "workr.exact=true"), "did you mean 'worker'"),
        (("up", "--home", "h", "--schema", "no.toml"), "error: no.toml: no such file"),
        (("replay", "ebnerd", "--behaviors", "no.parquet"), "no such file"),
        (("simulate", "--home", "no-home"), "roostream up"),
        (("bench", "decod"), "did you mean 'decode'"),
        (("bench", "decode", "--runs", "1"), "--runs: expected at least 3"),
        (("schema", "show", "no.toml"), "error: no.toml: no such file"),
    ],
    ids=lambda v: " ".join(v[:2]) if isinstance(v, tuple) else "",
)
def test_a_mistake_is_reported_in_one_sentence_with_exit_code_2(
    arguments: tuple[str, ...], message: str, roostream: Callable[..., tuple[int, str]]
) -> None:
    code, error = roostream(*arguments)
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1


VALID_WITHOUT_FILES = {"demo", "up", "prepare", "bench", "completion", "init", "checkpoint init", "plan"}
"""Commands that accept absent files; `demo` and `up` would start a stack."""


def with_absent_files(command: click.Command) -> list[str]:
    """Return arguments for `command` that name files, a home and ids that do not exist."""
    arguments = []
    for p in command.get_params(click.Context(command)):
        if isinstance(p, click.Argument):
            arguments.append("absent")
        elif p.name == "home":
            arguments += ["--home", "no-home"]
        elif p.required:
            arguments += [p.opts[0], "absent" if p.type.name in ("text", "path") else "7"]
    return arguments


@pytest.mark.parametrize(
    "path", [p for p in COMMANDS if " ".join(p) not in VALID_WITHOUT_FILES], ids=" ".join
)
def test_every_command_reports_absent_files_and_homes_without_a_traceback(
    path: tuple[str, ...], roostream: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, error = roostream(*path, *with_absent_files(COMMANDS[path]))
    assert code != 0 and error.strip()
    assert "Traceback" not in error


def test_ctrl_c_while_modules_are_imported_ends_quietly() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from roostream.cli.start import start\n"
        "start()"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_unwritable_kernel_cache_is_reported_with_the_variable_to_set(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "roostream.cli.main", "inspect", "table", "warehouse")
    cache = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": "/proc/nowhere"}
    environment = {**os.environ, **cache}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "set NUMBA_CACHE_DIR" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_log_level_starts_nothing(
    roostream: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOSTREAM_LOG", "debugg")
    code, error = roostream("up", "--home", "h")
    assert code == 2 and "did you mean 'DEBUG'" in error and not Path("h").exists()


def test_an_unusable_home_or_java_is_reported_in_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_402\"' >&2\n")
    old.chmod(0o755)
    for arguments, message in (
        (("/proc/h",), "another --home"),
        (("h", "--java", "/no/java"), "no java at"),
        (("h", "--java", "/bin/ls"), "got another program"),
        (("h", "--java", str(old)), "got version 8"),
    ):
        command = (sys.executable, "-m", "roostream.cli.main", "up", "--foreground", "--home", *arguments)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_wrong_key_is_reported_with_file_line_and_nearest_key(
    tmp_path: Path, roostream: Callable[..., tuple[int, str]]
) -> None:
    path = tmp_path / "shard.toml"
    path.write_text('controller = "127.0.0.1:1"\n\nindx = 1\n')
    code, error = roostream("shard", "--config", path)
    assert code == 2
    assert f"{path}:3: unknown key 'indx' = 1; did you mean 'index'?" in error


def test_several_files_can_follow_one_option(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    result = CliRunner().invoke(
        cli, ["replay", "ebnerd", "--behaviors", str(tmp_path / "a"), str(tmp_path / "b"), "--speed", "0x"]
    )
    assert "key 'speed': expected" in str(result.exception)


def test_a_schema_is_shown_with_its_families_written_out(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('[[nro]]\nonline = "ctr_{10m,1h}"\n[[label]]\nname = "click"\naction = "click"\n')
    result = CliRunner().invoke(cli, ["schema", "show", str(path)])
    assert '[[nro]]\nname = "ctr_10m"\nonline = "ctr_10m"\n\n[[nro]]\nname = "ctr_1h"\n' in result.output
    path.write_text(result.output)
    assert CliRunner().invoke(cli, ["schema", "show", str(path)]).output == result.output


def test_every_setting_of_a_replay_is_a_flag_with_its_help() -> None:
    output = CliRunner().invoke(cli, ["replay", "jsonl", "--help"]).output
    assert "--skip-bad" in output and "--window DURATION" in output and "[default: 30m]" in output
    assert "--behaviors" not in output, "a flag of another dataset"


def test_a_duration_of_another_form_is_reported() -> None:
    result = CliRunner().invoke(cli, ["replay", "jsonl", "--log", __file__, "--window", "soon"])
    assert result.exit_code == 2 and "expected a duration such as '500ms'" in result.output


def test_math_libraries_use_one_thread_by_default() -> None:
    code = "import roostream.cli, os; print(os.environ['OMP_NUM_THREADS'])"
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for environment, threads in ((environ, "1"), ({**environ, "OMP_NUM_THREADS": "2"}, "2")):
        done = subprocess.run(
            (sys.executable, "-c", code), env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == threads


def test_a_program_shows_its_keys_with_their_variables() -> None:
    output = CliRunner().invoke(cli, ["worker", "--show-config"]).output
    assert (
        "batch_requests  (integer, 1..65536, default " in output
        and "ROOSTREAM_WORKER_BATCH_REQUESTS" in output
    )
    assert "kafka_security.password  (text, default none)" in output


def test_keys_need_no_package_of_another_program() -> None:
    code = "import sys; from roostream.cli.main import main; main()"
    command = (sys.executable, "-X", "importtime", "-c", code, "shard", "--show-config")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout
    assert not any(line.endswith(("| torch", "|   torch")) for line in done.stderr.splitlines())


def test_only_import_log_needs_the_extra_warehouse(tmp_path: Path) -> None:
    without = "import sys; sys.modules['deltalake'] = None; from roostream.cli.main import main; main()"

    def run(*arguments: str) -> str:
        command = (sys.executable, "-c", without, "import", *arguments)
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr

    (tmp_path / "log.jsonl").write_text("")
    schema = ("--schema", "no.toml")
    assert "no.toml: no such file" in run("table", *schema, "--map", "m.toml", "--out", "o.jsonl", "i.csv")
    refused = run("log", *schema, "--warehouse", "warehouse", "log.jsonl")
    assert refused == "error: `import log` needs deltalake; pip install 'roostream[warehouse]'\n"


def test_a_command_whose_package_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.lazy, "absent", "absent_module:command")
    result = CliRunner().invoke(cli, ["absent"])
    assert isinstance(result.exception, SetupError) and "absent_module" in str(result.exception)


def test_a_mistyped_variable_stops_the_command_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, roostream: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.setenv("ROOSTREAM_SERVNG_EXPLORATION", "0.5")
    code, error = roostream("status")
    assert (
        code == 2
        and "error: environment ROOSTREAM_SERVNG_EXPLORATION: expected the name of a program" in error
    )
