"""A TOML refers to variables and files; what they hold reaches the setting and nothing that is shown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest

from roostream.errors import ConfigError
from roostream.schema.settings import Settings, load, setting
from roostream.schema.toml_file import MAX_BYTES, Referred


@dataclasses.dataclass(frozen=True, kw_only=True)
class Login(Settings):
    password: str = setting("", "its password")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clustered(Settings):
    address: str = setting("", "host:port")
    shards: tuple[str, ...] = setting((), "addresses")
    parts: int = setting(1, "how many", least=1, most=64)
    wait_ms: int = setting(1000, "how long")
    room_bytes: int = setting(1, "how much")
    share: float = setting(0.5, "a share")
    fast: bool = setting(False, "a switch")
    mode: Literal["on", "off"] = setting("off", "a choice")
    home: Path = setting(Path("."), "a folder")
    most: int | None = setting(None, "optional")
    login: Login = setting(factory=Login, help="a table")
    names: dict[str, str] = setting(factory=dict, help="names")


def read(tmp_path: Path, text: str, **environ: str) -> Clustered:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return load(Clustered, path, program="worker", environ=environ)


def test_a_variable_stands_anywhere_in_a_text(tmp_path: Path) -> None:
    found = read(
        tmp_path, 'address = "${HOST}.${ZONE}:70"\nnames = { a = "${HOST}" }', HOST="shard-0", ZONE="west"
    )
    assert (found.address, found.names) == ("shard-0.west:70", {"a": "shard-0"})


def test_a_file_is_referred_to_without_the_newline_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3c ret\n\n")
    assert read(tmp_path, f'[login]\npassword = "${{file:{tmp_path}/secret}}"').login.password == "s3c ret\n"


def test_what_is_not_a_text_is_read_from_one(tmp_path: Path) -> None:
    text = 'parts="${N}"\nwait="${T}"\nroom_bytes="${B}"\nshare="${F}"\nfast="${Y}"\nmode="${M}"\nhome="${H}"\nmost="${N}"'
    found = read(tmp_path, text, N="8", T="20s", B="64", F="0.25", Y="true", M="on", H="/data")
    assert (found.parts, found.wait_ms, found.room_bytes, found.share) == (8, 20_000, 64, 0.25)
    assert (found.fast, found.mode, found.home, found.most) == (True, "on", Path("/data"), 8)


def test_a_list_is_given_entry_by_entry_or_with_commas(tmp_path: Path) -> None:
    assert read(tmp_path, 'shards = ["${A}:1", "b:2"]', A="a").shards == ("a:1", "b:2")
    assert read(tmp_path, 'shards = "${ALL}"', ALL="a:1, b:2").shards == ("a:1", "b:2")
    assert read(tmp_path, 'shards = "${ALL}"', ALL='["a:1", "b:2"]').shards == ("a:1", "b:2")


def test_a_plain_dollar_and_brace_can_be_written(tmp_path: Path) -> None:
    assert read(tmp_path, 'address = "$${HOST}$5{}"').address == "${HOST}$5{}"


def test_references_are_not_followed_twice(tmp_path: Path) -> None:
    assert read(tmp_path, 'address = "${A}"', A="${B}", B="no").address == "${B}"


def test_the_environment_of_a_program_goes_before_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, 'address = "${A}"', A="a:1", ROOSTREAM_WORKER_ADDRESS="b:2").address == "b:2"


def test_what_a_reference_gave_is_not_shown(tmp_path: Path) -> None:
    found = read(tmp_path, '[login]\npassword = "${P}"', P="hunter2")
    assert "hunter2" not in repr(found) and "'${P}'" in repr(found)
    assert json.loads(json.dumps(dataclasses.asdict(found), default=str))["login"]["password"] == "hunter2"
    for text in (
        'parts = "${P}"',
        'wait = "${P}"',
        'mode = "${P}"',
        'share = "${P}"',
        'login = "${P}"',
        'names = "${P}"',
    ):
        with pytest.raises(ConfigError) as refused:
            read(tmp_path, text, P="hunter2")
        assert "hunter2" not in str(refused.value) and "${P}" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '\naddress = "${HOST}"',
            "x.toml:2: key 'address': expected the environment to have HOST, it doesn't; set it",
        ),
        (
            '[login]\npassword = "${file:/no/such}"',
            "x.toml:2: key 'login.password': expected a file that can be read at /no/such",
        ),
        ('shards = ["a", "${env:A}"]', r"got '\$\{env:A\}'; a plain '\$\{' is written '\$\$\{'"),
        ('address = "${}"', "expected \\${NAME} or \\${file:PATH}"),
        ('address = "${file:}"', "expected \\${NAME} or \\${file:PATH}"),
    ],
)
def test_what_cannot_be_followed_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, text)


def test_a_file_that_is_no_secret_is_refused(tmp_path: Path) -> None:
    big, binary = tmp_path / "big", tmp_path / "binary"
    big.write_text("x" * (MAX_BYTES + 1))
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="at most 1048576 bytes"):
        read(tmp_path, f'address = "${{file:{big}}}"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(tmp_path, f'address = "${{file:{binary}}}"')


def test_a_referred_text_is_a_text() -> None:
    told = Referred("a", "${A}")
    assert (told, f"{told}", {told: 1}["a"], repr(told)) == ("a", "a", 1, "'${A}'")
