"""The token of the admin port is read once, compared whole, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.schema.settings import SettingError
from serving.admin.admin_server import AdminToken, read_token

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_token_fits(header: str) -> None:
    assert AdminToken(TOKEN).fits(header)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}0",
        "Bearer \xff",
    ],
)
def test_nothing_else_does(header: str) -> None:
    assert not AdminToken(TOKEN).fits(header)


def test_a_file_gives_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f" {TOKEN}\nmore\n")
    token = read_token(str(tmp_path / "token"))
    assert token.fits(f"Bearer {TOKEN}") and TOKEN not in repr(vars(token))


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"\xff\xfe" * 20])
def test_a_file_that_keeps_nobody_out_is_refused_without_what_it_holds(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match="key 'admin_token_file': expected a f") as error:
        read_token(str(file))
    assert "short" not in str(error.value)
