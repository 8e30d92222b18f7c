"""Commands that the pages name: `roostream` has them, with the options that stand behind them."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from command.main import cli
from tests.contract.house import ROOT

PAGES = (
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name not in ("decisions", "benchmarks")),
)
_SAID = re.compile(r"`roostream ([a-z][^`\n]*)`|^(?:.*(?:&&|--) )?(?:[A-Z_]+=\S+ )*roostream ([a-z].*)$", re.MULTILINE)


def commands(text: str) -> list[str]:
    """What stands behind the word, on a line of its own or within a sentence, without what explains it or is another's."""
    text = re.sub(r"\$\([^)]*\)", "made", text.replace("\\\n", " "))
    found = [inline or line for inline, line in _SAID.findall(text)]
    return [re.split(r" # |\s{3,}| && | >| \| (?!\w+ )|; ", said)[0] for said in found]


def unknown(said: str) -> str:
    """The first word of a command that there isn't; "" where all are known. Places for arguments are passed over."""
    command: click.Command = cli
    words = re.sub(r"[\[\]…]|\.\.\.", " ", said).split()
    while isinstance(command, click.Group) and words:
        word = words.pop(0)
        if word.isupper() or ("…" in said and word.startswith("-")):
            return ""  # a place for one of several
        found = command.get_command(click.Context(command), word)
        if found is None:
            return word
        command = found
    known = {
        name for parameter in command.get_params(click.Context(command)) for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    own = words[: words.index("--")] if "--" in words else words
    return next(
        (
            word
            for word in (w.partition("=")[0].rstrip(".,;:)") for w in own)
            if re.match(r"--?[a-z]", word) and word not in known
        ),
        "",
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_there_is(page: Path) -> None:
    said = commands(page.read_text(encoding="utf-8"))
    assert {command: word for command in said if (word := unknown(command))} == {}


def test_enough_is_found_and_what_is_wrong_is_told() -> None:
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 150
    assert commands("a `roostream up --home x` and\nX=1 roostream topics keep 7d   # a week\n") == [
        "up --home x",
        "topics keep 7d",
    ]
    assert [unknown(c) for c in ("archiver --set x=1", "upp", "checkpoint rolback 1", "up --home x", "up [--workers N]")] == [
        "--set",
        "upp",
        "rolback",
        "",
        "",
    ]
