"""What a program's TOML is made of."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from infra.child import Program
from infra.home import Home
from infra.kinds import names
from infra.options import ROOT, StackOptions
from infra.places import draw
from infra.ports import Ports
from infra.programs import plain, program, site_of
from infra.supervisor import Supervisor
from roostream.runtime.program import REFUSED_CODE

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
KEYS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1)


@given(
    st.dictionaries(KEYS, VALUES | st.lists(st.integers(-9, 9))), st.dictionaries(KEYS, VALUES, min_size=1)
)
def test_what_is_written_is_what_is_read(flat: dict[str, object], inner: dict[str, object]) -> None:
    table = {k: v for k, v in flat.items() if k != "inner"} | {"inner": inner}
    assert tomllib.loads(tomli_w.dumps(plain(table))) == table


def test_paths_and_tuples_have_a_form() -> None:
    table = {"home": Path('/a "b"\\c'), "shards": ("x:1", "y:2"), "rule": {"files": (Path("d"),)}}
    assert tomllib.loads(tomli_w.dumps(plain(table))) == {
        "home": '/a "b"\\c',
        "shards": ["x:1", "y:2"],
        "rule": {"files": ["d"]},
    }


def test_a_value_without_a_form_is_refused() -> None:
    with pytest.raises(TypeError):
        tomli_w.dumps(plain({"x": None}))


@pytest.fixture
def ports() -> Iterator[Ports]:
    drawn = Ports()
    yield drawn
    drawn.release()


def built(name: str, home: Path, ports: Ports, **overrides: dict[str, object]) -> Program:
    options = StackOptions(num_archivers=2, overrides=overrides)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return program(site_of(name, Home(home), options, draw(ports, options, names(options))), env)


def test_a_program_of_ours_that_refuses_its_file_stays_down_with_its_sentence(
    tmp_path: Path, ports: Ports
) -> None:
    """As the supervisor of a stack runs it: a process, its exit code, its log."""
    Home(tmp_path).make()
    supervisor = Supervisor(lambda: None).open()
    try:
        supervisor.want([built("controller", tmp_path, ports, controller={"neighbours": ["nonsense"]})])
        slot = supervisor.slots["controller"]
        assert supervisor.wait(lambda: slot.state == "failed", 60.0), slot
    finally:
        supervisor.close()
    assert slot.exit_code == REFUSED_CODE and slot.restarts.total == 0
    assert re.match(
        r".*/conf/controller\.toml:\d+: key 'neighbours': expected NAME=URL, .*got 'nonsense'", slot.said
    ), slot.said


def test_a_program_says_by_which_code_it_is_refused_and_which_file_may_be_mended(
    tmp_path: Path, ports: Ports
) -> None:
    made = built("controller", tmp_path, ports)
    assert made.refusal == REFUSED_CODE and made.reads == (StackOptions().schema,) and made.after == ()
    assert built("compactor", tmp_path, ports).reads == ()


@pytest.mark.parametrize(
    ("warehouse", "after"),
    [("warehouse", ("archiver", "archiver-1")), ("other", ()), ("s3://b/warehouse", ())],
)
def test_a_model_that_begins_in_the_stacks_own_archive_waits_for_it(
    warehouse: str, after: tuple[str, ...], tmp_path: Path, ports: Ports
) -> None:
    """Which is empty at first, and then no refusal: there is nothing to be trained from it."""
    place = warehouse if "://" in warehouse else str(tmp_path / warehouse)
    assert built("controller", tmp_path, ports, controller={"warehouse": place}).after == after
    assert built("worker", tmp_path, ports, controller={"warehouse": place}).after == ()
