"""The documentation, public docstrings and messages follow the house style in `prose.toml`: short sentences,
few passives, no empty words, American spelling."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from tests.contract.source_tree import ROOT, parse_file, relative_path, sources

STYLE = tomllib.loads((ROOT / "tests/contract/prose.toml").read_text(encoding="utf-8"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|been|being|be) (?:\w+ly )?"
    rf"(?!(?:{'|'.join(STYLE['passive']['no_agent'])}) )\w+(?:ed|en|ead|ade|ept|ent|own) by\b"
)
MESSAGE_CALL = re.compile(r"(?:Error|Exception|[Ff]ail(?:ed)?|error|warning|info|exception|setting|option)$")
_LIST_ITEM = re.compile(r"\n(?=\s*(?:[-*|#]|\d+[.:]? ))")


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph without code, and its location."""

    where: str
    words: str


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph) of Markdown without code blocks, tables, headings and legends. Inline code is `X`."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    line = 1
    for block in re.split(r"(\n\s*\n)", text):
        at = line
        for item in _LIST_ITEM.split(block):
            if item.strip() and not item.lstrip("\n").startswith(("|", "#", "![", "<", "    ", "Letters:")):
                plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", item)
                plain = re.sub(r"`+[^`]*`+", "X", plain).replace("*", "").replace("_", " ")
                yield at, " ".join(plain.removeprefix("> ").split())
            at += item.count("\n") + 1
        line += block.count("\n")


def sentences(paragraph: str) -> list[str]:
    """Split at full stops, and also at colons and semicolons, which end a thought too."""
    return re.split(r"(?<=[.!?:;])[)\"]?\s+", paragraph)


def without_drawings(docstring: str) -> str:
    """The docstring without drawings and tables. Their lines are indented or have gaps."""
    kept = [line for line in docstring.splitlines() if not re.match(r"\s{2,}|.*\S\s{2,}\S|.*[─│┌└►▲]", line)]
    return "\n".join(kept)


@cache
def documentation() -> list[Text]:
    return [
        Text(f"{relative_path(path)}:{line}", words)
        for path in PAGES
        for line, words in paragraphs(path.read_text(encoding="utf-8"))
    ]


@cache
def docstrings() -> list[Text]:
    """Docstrings of modules and of public classes and functions."""
    found = []
    for path in sources():
        for node in ast.walk(parse_file(path)):
            has_name = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(node, ast.Module) or (has_name and not node.name.startswith("_")):
                text = ast.get_docstring(node) or ""
                where = f"{relative_path(path)}:{getattr(node, 'lineno', 1)}"
                found += [Text(where, words) for _, words in paragraphs(without_drawings(text))]
    return found


@cache
def messages() -> list[Text]:
    """Texts that programs print: errors, log lines, and the help for settings and options."""
    found = []
    for path in sources():
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.Call) and MESSAGE_CALL.search(
                getattr(node.func, "id", getattr(node.func, "attr", ""))
            ):
                for text in (*node.args, *(k.value for k in node.keywords if k.arg == "help")):
                    if words := _constant_text(text):
                        found.append(Text(f"{relative_path(path)}:{node.lineno}", " ".join(words.split())))
    return found


def _constant_text(node: ast.expr) -> str:
    """The text with `X` for each inserted value; "" if the expression is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
        return re.sub(r"`[^`]*`|%[-\w.]+", "X", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        return re.sub(r"`[^`]*`", "X", "".join(parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _constant_text(node.left) + _constant_text(node.right)
    return ""


SOURCES = pytest.mark.parametrize("texts", [documentation, docstrings, messages], ids=lambda f: f.__name__)


@SOURCES
def test_sentences_are_short(texts: object) -> None:
    assert callable(texts)
    too_long = [
        f"{text.where}: {len(sentence.split())} words: {sentence}"
        for text in texts()
        if not text.where.startswith(tuple(STYLE["any_length"]))
        for sentence in sentences(text.words)
        if len(sentence.split()) > STYLE["max_words"]
    ]
    assert too_long == [], "\n".join(too_long)


@SOURCES
def test_empty_words_are_not_used(texts: object) -> None:
    assert callable(texts)
    known = {word.lower(): better for word, better in STYLE["instead"].items()}
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, known))})(?![\w-])", re.IGNORECASE)
    violations = [
        f"{text.where}: {found[0]!r}: write {known[found[0].lower()]}"
        for text in texts()
        for found in pattern.finditer(text.words)
    ]
    assert violations == [], "\n".join(violations)


def test_pages_are_in_the_active_voice() -> None:
    by_page: dict[str, list[str]] = {}
    for text in documentation():
        by_page.setdefault(text.where.partition(":")[0], []).extend(sentences(text.words))
    passive = {
        page: [s for s in found if PASSIVE.search(s)]
        for page, found in by_page.items()
        if len(found) >= STYLE["passive"]["pages_of"] and not page.startswith(tuple(STYLE["any_length"]))
    }
    allowed = {page: STYLE["passive"]["max_share"] * len(by_page[page]) for page in passive}
    worst = [f"{page}: {found}" for page, found in passive.items() if len(found) > allowed[page]]
    assert worst == [], "\n".join(worst)


def test_words_are_spelled_as_in_american_english() -> None:
    texts = [*documentation(), *docstrings(), *messages()]
    command = (sys.executable, "-m", "codespell_lib", "--builtin", "clear,rare,en-GB_to_en-US")
    ignored = ("--ignore-words-list", ",".join(STYLE["spelled_right"]))
    completed = subprocess.run(
        (*command, *ignored, "-"),
        input="\n".join(text.words for text in texts),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    wrong = [
        f"{texts[int(line) - 1].where}: {found.strip()}"
        for line, found in re.findall(r"^(\d+): .*\n\s*(.* ==> .*)$", completed.stdout, re.MULTILINE)
    ]
    assert completed.returncode == 0 and wrong == [], "\n".join(wrong) + completed.stderr
