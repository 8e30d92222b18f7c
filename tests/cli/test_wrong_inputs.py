"""Every command answers a wrong input with exit code 2 and one sentence that says what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from roostream.cli.main import main

ROOT = Path(__file__).parents[2]
SHOP = str(ROOT / "examples" / "shop" / "shop.toml")
FILES = {
    "bad.toml": 'name = "x"\n[tables.item]\ndim = "big"\n',
    "broken.toml": "name = \n",
    "model.toml": 'kind = "rankr"\n',
    "map.toml": 'request = "r"\n',
    "keys.json": "{",
    "empty.jsonl": "",
    "log.jsonl": '{"type": "engagement"}\n',
    "two.jsonl": '{"type": "impression", "request_id": "r", "user_id": "a", "time": "2024-05-01T08:00:00", '
    '"candidates": [{"item_id": "boot"}]}\n{"type": "engagement", "request_id": "r", "user_id": "a", '
    '"time": "2024-05-01T08:00:04", "item_id": "boot", "action": "click"}\n',
    "x.parquet": "no Parquet",
    "deep.json": "[" * 100_000,
}
LOG = ("--schema", SHOP, "--log", "log.jsonl")
REPLAY = ("replay", "jsonl", *LOG, "--engine", "local")
TABLE = ("--impressions", "x.parquet", "--engagements", "x.parquet")
ADMIN = ("versions", "list", "--admin", "127.0.0.1:1", "--token-file", "map.toml")
PLACEMENT = ("placement", "plan", "--store", "nothere", "--schema", SHOP, "--owners", "2")
WRONG_INPUTS: list[tuple[str, ...]] = [  # words of the expected message, then the command
    ("no such file", "check", "--schema", "nothere.toml", "--log", "log.jsonl"),
    ("no such file", "check", "--schema", SHOP, "--log", "nothere.jsonl"),
    ("got a folder", "check", "--schema", SHOP, "--log", "folder"),
    ("got a folder", "check", "--schema", "folder", "--log", "log.jsonl"),
    ("got an empty text", "check", "--schema", SHOP, "--log", ""),
    ("expected integer", "check", "--schema", "bad.toml", "--log", "log.jsonl"),
    ("correct the schema", "check", "--schema", "bad.toml", "--log", "log.jsonl"),
    ("expected TOML", "check", "--schema", "broken.toml", "--log", "log.jsonl"),
    ("at least one usable", "check", "--schema", SHOP, "--log", "empty.jsonl"),
    ("--impressions", "check", "--schema", SHOP),
    ("no such file", *REPLAY, "--model", "nothere.toml"),
    ("did you mean 'ranker'", *REPLAY, "--model", "model.toml"),
    ("did you mean 'batch_requests'", *REPLAY, "--set", "worker.batch_requets=3"),
    ("did you mean 'worker'", *REPLAY, "--set", "wroker.batch_requests=3"),
    ("expected integer", *REPLAY, "--set", "worker.batch_requests=many"),
    ("--engine stack", *REPLAY, "--home", "home"),
    ("existing, writable folder", *REPLAY, "--report", "/nothere/report.json"),
    ("expected a Parquet file", "replay", "parquet", *TABLE, "--schema", SHOP, "--engine", "local"),
    (
        "is no table",
        "replay",
        "warehouse",
        "--warehouse",
        "nothere",
        "--days",
        "2024-05-01..",
        "--schema",
        SHOP,
    ),
    ("expected a name", "init", "bad!name"),
    ("expected an action", "init", "x", "--from", "two.jsonl", "--click", "nothing"),
    ("100 to 1,000,000", "init", "x", "--requests", "3"),
    ("got 0", "init", "x", "--requests", "0"),
    ("folder '.'", "init", "."),
    (
        "list of text",
        "import",
        "table",
        "--schema",
        SHOP,
        "--map",
        "map.toml",
        "--out",
        "o.jsonl",
        "x.parquet",
    ),
    ("s3://bucket/prefix", "import", "log", "--schema", SHOP, "--warehouse", "ftp://x", "log.jsonl"),
    ("no such file", "check-model", "nothere.toml", "--schema", SHOP),
    ("2024-05-01..2024-05-07", "train", "--warehouse", "w", "--schema", SHOP, "--days", "yesterday"),
    ("1..64", "train", "--warehouse", "w", "--schema", SHOP, "--days", "2024-05-01..", "--workers", "0"),
    ("does not exist", "status", "--home", "nothere"),
    ("does not exist", "down", "--home", "nothere"),
    ("no stack", "audit", "--home", "nothere"),
    ("no logs", "logs", "--home", "nothere", "worker"),
    ("no stack.json", "reset", "--home", "folder", "--yes"),
    ("no store", "checkpoint", "list", "--home", "nothere"),
    ("s3://", "checkpoint", "list", "--store", "ftp://x"),
    ("export.json", "checkpoint", "import", "--from", "nothere", "--home", "home"),
    ("safetensors", "checkpoint", "import", "--from", "nothere.safetensors", "--home", "home"),
    ("Connection refused", "scale", "--workers", "2", "--controller", "127.0.0.1:1"),
    ("worker-N or shard-N", "drain", "nobody", "--home", "nothere"),
    ("worker-N or shard-N", "drain", "worker-" + "9" * 20, "--controller", "127.0.0.1:1"),
    ("expected an address", "audit", "--kafka", "nohost"),
    ("--prefix is only used with --kafka", "audit", "--home", "nothere", "--prefix", "site."),
    ("--partitions is only used with --kafka", "audit", "--home", "nothere", "--partitions", "4"),
    ("--link is only used with --controller", "scale", "--workers", "2", "--link", "map.toml"),
    ("--link is only used with --controller", "trainer", "release", "--link", "map.toml"),
    ("--features is only used with", "inspect", "session", "--leases", "nothere", "--features", "a"),
    ("--certificate is only used with --ca", *ADMIN, "--certificate", "x.pem"),
    ("--module is only used with --write-torchrec", *PLACEMENT, "--module", "a.b"),
    ("shard-0 to shard-1", "up", "--home", "home", "--port", "shard-2=8080"),
    ("NAME=PORT", "up", "--home", "home", "--port", "serving=" + "9" * 5000),
    ("expected integer", "up", "--home", "home", "--set", "worker.batch_requests=" + "9" * 5000),
    ("`placement map --json`", "placement", "apply", "deep.json", "--home", "nothere"),
    ("`placement plan --json`", "placement", "diff", "deep.json", "deep.json"),
    ("captured session", "replay", "session", "deep.json", "nothere"),
    ("export.json cannot be read", "checkpoint", "import", "--from", "folder", "--home", "home"),
    ("shard-0 to shard-1", "up", "--home", "home", "--port", "shard-one=8080"),
    ("no port of kafka", "up", "--home", "home", "--kafka", "127.0.0.1:1", "--port", "kafka=8080"),
    ("expected a path, got ''", "train", "--warehouse", "w", "--schema", SHOP, "--home", ""),
    ("(Connection refused)", *ADMIN),
    ("expected an address", "trainer", "release", "--controller", "nothost"),
    ("--kafka: expected an address", "topics", "create", "--kafka", "nohost"),
    ("expected a duration", "topics", "keep", "5x", "--kafka", "127.0.0.1:1"),
    ("did you mean 'rank'", "keys", "new", "web", "--scope", "rnk", "--file", "new.json"),
    ("got something else", "keys", "list", "--file", "keys.json"),
    ("saved by a worker", "inspect", "batch", "log.jsonl"),
    ("is no table", "inspect", "table", "nothere"),
    ("bucket map", "placement", "apply", "nothere.json", "--home", "nothere"),
    ("no such file", "schema", "show", "nothere.toml"),
    ("unknown key", "serving", "--config", "bad.toml"),
    ("expected an address", "up", "--home", "home", "--kafka", "nothost"),
    ("did you mean 'serving'", "up", "--home", "home", "--port", "sering=8080"),
    ("unknown key", "up", "--home", "home", "--set", "worker.nothing=3"),
    ("1..64", "up", "--home", "home", "--workers", "0"),
    ("above 0", "plan", "--requests-per-s", "0"),
    ("smaller", "plan", "--requests-per-s", "inf"),
    ("smaller", "plan", "--requests-per-s", "1e308", "--json"),
    ("nearly 0", "plan", "--requests-per-s", "1e-320"),
    ("smaller", "plan", "--requests-per-s", "100", "--machine-hour", "inf"),
    ("without ':'", "up", "--home", "a:b"),
    ("in UTF-8", "inspect", "file", "a\udcff", "x"),
    ("shorter path", "check", "--schema", "x" * 300, "--log", "log.jsonl"),
    ("shorter path", "check", "--schema", SHOP, "--log", "x" * 300),
    ("levels of symbolic links", "check-model", "loop", "--schema", SHOP),
    ("Is a directory", "check-model", "folder", "--schema", SHOP),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "export.json").write_text(FILES["deep.json"])
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Run `roostream ARGUMENTS`. Return the exit code and standard error."""
    monkeypatch.setattr(sys, "argv", ["roostream", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capfd.readouterr().err


@pytest.mark.parametrize("case", WRONG_INPUTS, ids=lambda case: " ".join(case[1:])[:60])
def test_a_wrong_input_is_answered_in_one_sentence_that_says_what_to_do(
    case: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    word, *arguments = case
    code, error = run_command(tuple(arguments), monkeypatch, capfd)
    last = error.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and word in last, error
    assert "; " in last or ". " in last, f"{last}: expected the message to say what to do"
    assert "Traceback" not in error and "Error(" not in error and "[Errno" not in error, error


@pytest.mark.parametrize(
    "arguments",
    [
        ("statsu",),
        ("replay", "jsnl"),
        ("replay", "jsonl", *LOG, "--engine", "lokal"),
        ("check", *LOG, "--window", "5x"),
        ("scale", "--workers", "zero"),
        ("checkpoint", "rollback", "three"),
        ("demo", "--rate", "-1"),
        ("audit", "--kafka", "127.0.0.1:1", "--partitions", "0"),
        ("demo", "--seconds", "0"),
        ("demo", "--rate", "nan"),
        ("up", "--home", ""),
        ("reset", "--home", "", "--yes"),
        ("import", "log", "log.jsonl", "--schema", SHOP, "--warehouse", ""),
        ("checkpoint", "init", "--store", ""),
        ("checkpoint", "rollback", "1", "--store", "", "--yes"),
        ("checkpoint", "export", "--to", ""),
        ("checkpoint", "import", "--from", ""),
        ("demo", "--seconds", "inf"),
        ("drain", "worker", "--notice", "nan"),
        ("placement", "plan", "--memory", "nan"),
        ("plan",),
        ("next-item",),
        ("check", "--log", "log.jsonl"),
        ("replay", "warehouse"),
        ("scale", "--workers", "2", "--wait", "nan"),
        ("scale", "--workers", "2", "--wait", "-5"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_name_the_help_of_the_command(
    arguments: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, error = run_command(arguments, monkeypatch, capfd)
    assert code == 2 and error.startswith("Usage: roostream") and "--help' for help" in error, error
    assert "Traceback" not in error
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "folder", "loop"])


def test_a_deleted_current_folder_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    code, error = run_command(("status",), monkeypatch, capfd)
    monkeypatch.chdir(folder)
    assert code == 2 and "current folder does not exist" in error and len(error.splitlines()) == 1


def test_characters_that_a_terminal_cannot_show_are_escaped(folder: Path) -> None:
    command = (sys.executable, "-m", "roostream.cli.main", "check", "--schema", SHOP, "--log", "two.jsonl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert b"requests" in done.stdout and done.stdout.isascii() and b"Traceback" not in done.stderr


def test_a_locale_without_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "käufe.csv").write_text("user,item,time,click\na,1,2024-05-01,1\na,2,2024-05-01,0\n")
    command = (sys.executable, "-m", "roostream.cli.main", "init", "shop", "--from", "käufe.csv")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **locale}, capture_output=True, check=False
    )
    assert done.returncode == 2 and b"error: expected a locale with UTF-8, got ascii" in done.stderr


def test_a_limit_of_file_sizes_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    command = f"ulimit -f 8; exec {sys.executable} -m roostream.cli.main init shop"
    done = subprocess.run(
        ("bash", "-c", command), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert (done.returncode, b"ulimit -f" in done.stderr, b"Traceback" in done.stderr) == (2, True, False)
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = run_command(("up", "--home", "home", "--port", f"serving={port}"), monkeypatch, capfd)
    assert code == 2 and f"port {port} for serving is in use; " in error
