"""`roostream drain` and `roostream trainer release` against the RPC server of a fake controller."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infra import program_specs
from roostream.cli.controller_commands import parse_program_name
from roostream.cli.main import cli
from roostream.errors import ConfigError, TransportError, UnavailableError
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header


@pytest.mark.parametrize("index", [0, 3])
def test_names_of_a_stack_are_parsed_to_role_and_index(index: int) -> None:
    specs = program_specs.SPECS_BY_NAME
    assert parse_program_name(specs["worker"].instance_name(index)) == ("worker", index)
    assert parse_program_name(specs["shard"].instance_name(index)) == ("shard", index)
    assert parse_program_name("controller") == ("controller", 0)
    assert parse_program_name("worker-0") == (
        "worker",
        0,
    )  # in a Kubernetes StatefulSet, whose pods count from 0


@pytest.mark.parametrize("name", ["serving", "shard", "worker-", "worker-x", "controller-1", "shard-1 "])
def test_other_names_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="worker-N"):
        parse_program_name(name)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"committed": True, "seq": 7, "why": ""}, 0),
        ({"committed": False, "seq": 7, "why": "the controller is cutting: start"}, 1),
    ],
)
def test_drain_calls_the_controller_and_shows_the_commit(answer: Header, code: int) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def handle(method: str, header: Header, arrays: Sequence[Any]) -> tuple[Header, Sequence[Any]]:
        calls.append((method, {k: header[k] for k in ("role", "index", "notice_s")}))
        return answer, ()

    server = RpcServer(handle).start()
    try:
        done = CliRunner().invoke(cli, ["drain", "shard-1", "--notice", "9", "--controller", server.address])
    finally:
        server.stop()
    assert (done.exit_code, calls) == (code, [("preempt", {"role": "shard", "index": 1, "notice_s": 9.0})])
    assert "commit 7" in done.output and answer["why"] in done.output


@pytest.mark.parametrize(
    "command", [("drain", "worker"), ("scale", "--workers", "2"), ("trainer", "release")]
)
def test_an_error_names_the_controller_and_no_method_of_its_protocol(command: Sequence[str]) -> None:
    away = CliRunner().invoke(cli, [*command, "--controller", "127.0.0.1:9"])
    assert isinstance(away.exception, TransportError)
    assert str(away.exception) == "controller at 127.0.0.1:9: can't connect (Connection refused)"


def test_a_protected_controller_is_called_with_the_link_table_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    (tmp_path / "worker.toml").write_text('shards = ["a:1"]\n[link]\ntoken_file = "${TOKEN}"\n')
    credentials = LinkCredentials(LinkSecurity(token_file=str(tmp_path / "token")))
    server = RpcServer(
        lambda method, header, arrays: ({"held": False, "reason": ""}, ()), credentials=credentials
    ).start()
    command = ["trainer", "release", "--controller", server.address]
    try:
        without = CliRunner().invoke(cli, command)
        environ = {"TOKEN": str(tmp_path / "token")}
        with_link = CliRunner().invoke(cli, [*command, "--link", str(tmp_path / "worker.toml")], env=environ)
    finally:
        server.stop()
    assert isinstance(without.exception, UnavailableError) and "token" in str(without.exception)
    assert with_link.exit_code == 0 and "not held" in with_link.output
