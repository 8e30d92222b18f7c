"""What a controller is asked for from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infra import program_specs
from roostream.cli.background_stack import ReadyWait, absolute_location, restarting_programs, settled_programs
from roostream.cli.controller_commands import parse_program_name
from roostream.cli.main import cli
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header


@pytest.mark.parametrize("index", [0, 1, 12])
def test_jobs_are_called_as_their_programs_are_in_a_stack(index: int) -> None:
    assert parse_program_name(program_specs.SPECS_BY_NAME["worker"].instance_name(index)) == ("worker", index)
    assert parse_program_name(program_specs.SPECS_BY_NAME["shard"].instance_name(index)) == ("shard", index)
    assert parse_program_name("controller") == ("controller", 0)
    assert parse_program_name("worker-0") == ("worker", 0)  # of a set whose members count from 0


@pytest.mark.parametrize(
    "name", ["serving", "shard", "worker-", "worker-x", "controller-1", "kafka", "", "shard-1 "]
)
def test_a_program_that_keeps_nothing_of_training_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected controller, worker, worker-N or shard-N, got .*: other programs lose nothing",
    ):
        parse_program_name(name)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (
            {"committed": True, "seq": 7, "why": ""},
            0,
            "shard-1 goes; everything trained is committed (commit 7)",
        ),
        (
            {"committed": False, "seq": 7, "why": "the controller is cutting: start"},
            1,
            "within 9 s: the controller is cutting: start; what was trained since commit 7 is trained again",
        ),
    ],
)
def test_preempt_tells_what_became_of_what_was_trained(answer: Header, code: int, said: str) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def handle(method: str, header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
        asked.append((method, {k: header[k] for k in ("role", "index", "notice_s")}))
        return answer, ()

    server = RpcServer(handle).start()
    try:
        done = CliRunner().invoke(
            cli, ["preempt", "shard-1", "--notice", "9", "--controller", server.address]
        )
    finally:
        server.stop()
    assert (done.exit_code, asked) == (code, [("preempt", {"role": "shard", "index": 1, "notice_s": 9.0})])
    assert said in done.output


def test_a_controller_that_asks_is_asked_with_the_keys_of_a_programs_settings(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "worker.toml").write_text('shards = ["a:1"]\n[link]\ntoken_file = "${TOKEN}"\n')
    keys = LinkCredentials(LinkSecurity(token_file=str(tmp_path / "token")))
    server = RpcServer(lambda method, header, arrays: ({"held": False, "reason": ""}, ()), keys=keys).start()
    command = ["trainer", "release", "--controller", server.address]
    try:
        alone = CliRunner().invoke(cli, command)
        environ = {"TOKEN": str(tmp_path / "token")}
        known = CliRunner().invoke(cli, [*command, "--link", str(tmp_path / "worker.toml")], env=environ)
    finally:
        server.stop()
    assert isinstance(alone.exception, UnavailableError) and "expected a token" in str(alone.exception)
    assert (known.exit_code, known.output) == (0, "training is not held\n")


def test_a_program_that_rests_since_training_is_held_is_where_it_is_to_be() -> None:
    states = {"controller": "ready", "worker": "held", "shard-0": "starting", "shard-1": "failed"}
    found = settled_programs({name: {"state": state} for name, state in states.items()})
    assert found["controller"] == "controller is ready" and found["worker"].startswith(
        "worker rests, since training is held"
    )
    assert set(found) == {"controller", "worker"}


def test_who_dies_while_a_stack_starts_is_told_with_its_last_words_and_its_log() -> None:
    entry = {"log": "/h/logs/a.log", "said": "store s3://b is away"}
    programs = {name: {**entry, "state": name} for name in ("waiting", "starting", "ready", "failed")}
    programs["other"] = {**entry, "state": "starting", "said": ""}
    told = "died and is tried again: store s3://b is away; its log: /h/logs/a.log"
    assert restarting_programs(programs) == [f"waiting {told}", f"starting {told}"]


@pytest.mark.parametrize(
    ("text", "place"), [("s3://b/p", "s3://b/p"), ("/a/b", "/a/b"), ("b/c", "/here/b/c"), ("./b", "/here/b")]
)
def test_a_place_is_the_callers_though_programs_have_a_folder_of_their_own(
    text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_location(text) == place.replace("/here", str(tmp_path))


def test_a_busy_machine_is_waited_for_while_more_and_more_is_ready() -> None:
    now_s = [0.0]
    patience = ReadyWait(120.0, lambda: now_s[0])
    ended = {}
    for now_s[0], num_done in ((100.0, 3), (119.0, 3), (219.0, 4), (338.0, 4), (339.0, 4)):
        ended[now_s[0]] = patience.ends(num_done)
    assert [at for at, is_over in ended.items() if is_over] == [339.0], "120 s behind the fourth"
