"""The token of the admin port is read once, compared whole, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.schema.settings import SettingError
from serving.admin.admin_server import AdminToken, read_token

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
def test_the_right_token_is_accepted(header: str) -> None:
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
def test_any_other_token_is_refused(header: str) -> None:
    assert not AdminToken(TOKEN).fits(header)


def test_the_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f" {TOKEN}\nmore\n")
    token = read_token(str(tmp_path / "token"))
    assert token.fits(f"Bearer {TOKEN}") and TOKEN not in repr(vars(token))


@pytest.mark.parametrize("content", [None, b"", b"short\n", b"\xff\xfe" * 20])
def test_an_empty_or_public_token_file_is_refused_without_printing_it(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match="key 'admin_token_file': expected a f") as error:
        read_token(str(file))
    assert "short" not in str(error.value)
