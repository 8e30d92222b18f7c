"""The runner behind `make mutants` breaks what it says it breaks, and every core file that it names is there."""

from __future__ import annotations

import ast

from tests import mutants


def test_every_core_file_has_places_to_break() -> None:
    for room, stems in mutants.CORE.items():
        for stem in stems:
            assert mutants.mutants_of(f"{room}/{stem}.py"), (room, stem)


def test_a_change_is_one_change_and_still_python() -> None:
    file = "joiner/turn.py"
    whole, found = ast.unparse(ast.parse((mutants.ROOT / file).read_text())), mutants.mutants_of(file)
    texts = {mutants.mutated(mutant) for mutant in found}
    assert whole not in texts and len(texts) > len(found) * 0.9
    for text in texts:
        ast.parse(text)
        lines, before = text.splitlines(), whole.splitlines()
        assert sum(a != b for a, b in zip(lines, before, strict=False)) <= 2 or len(lines) < len(before)


def test_what_is_explained_is_a_change_that_can_be_made() -> None:
    """An entry whose line has changed explains nothing any more: take it out, or explain it anew."""
    known = mutants.explained()
    assert all(why for why in known.values())
    possible = {mutants.place_of(mutant) for file in {file for file, _, _ in known} for mutant in mutants.mutants_of(file)}
    assert set(known) <= possible, set(known) - possible


def test_what_is_chosen_stays_chosen_when_other_code_changes() -> None:
    pool = [m for file in ("joiner/turn.py", "roo/ids.py", "roo/wire.py") for m in mutants.mutants_of(file)]
    chosen = mutants.chosen_of(pool, 30, seed=1)
    assert mutants.chosen_of(pool, 30, seed=2) != chosen and mutants.chosen_of(pool[::-1], 300, seed=1)[0] in pool
    fewer = [m for m in pool if m.file != "roo/ids.py"]
    left = [m for m in chosen if m.file != "roo/ids.py"]
    assert 0 < len(left) < 30 and mutants.chosen_of(fewer, len(left), seed=1) == left


def test_texts_annotations_and_what_is_raised_are_left_alone() -> None:
    tree = ast.parse(
        "def f(x: int = 1) -> int:\n"
        '    """one"""\n'
        "    assert x == 2\n"
        '    log.info("%d", 3)\n'
        "    if x < 4:\n"
        "        raise ValueError(5)\n"
        "    return x\n"
    )
    changed = [ast.unparse(ast.fix_missing_locations(new)).split(":")[0] for *_, new in mutants.places(tree)]
    assert changed == ["if not x < 4", "x <= 4", "5"], changed
    told = ast.parse("class A(B, frozen=True):\n    x = f(1, strict=True)\n")
    assert [ast.unparse(ast.fix_missing_locations(new)) for *_, new in mutants.places(told)] == ["2"]
