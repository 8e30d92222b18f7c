"""`roostream check` reports what is wrong with a log before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from roostream.cli.main import cli
from roostream.cli.replay import check_command
from roostream.errors import ConfigError, SchemaError, UnavailableError
from roostream.replay.config import CheckConfig
from roostream.runtime.program import Stop

T0 = 1_700_000_000_000
SCHEMA = """
[tables.item]
dim = 4
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[nro]]
name = "price"
[[nro]]
name = "ctr"
online = "ctr_1h"
[[label]]
name = "click"
action = "click"
"""


def make_impression(number: int, **more: Any) -> dict[str, Any]:
    candidates = [{"item_id": i, "price": 2.0 * i} for i in range(1, 4)]
    return {
        "type": "impression",
        "request_id": f"r{number}",
        "user_id": 1 + number % 3,
        "time": T0 + 60_000 * number,
        "candidates": candidates,
        **more,
    }


def make_engagement(number: int, seconds: int = 5, **more: Any) -> dict[str, Any]:
    time_ms = T0 + 60_000 * number + 1000 * seconds
    ids = {"request_id": f"r{number}", "user_id": 1 + number % 3}
    return {"type": "engagement", **ids, "time": time_ms, "item_id": 2, "action": "click", **more}


def check(folder: Path, *lines: object, flags: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    (folder / "s.toml").write_text(SCHEMA)
    (folder / "log.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    report = folder / "out.json"
    paths = ("--schema", str(folder / "s.toml"), "--log", str(folder / "log.jsonl"), "--report", str(report))
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *paths, *flags], standalone_mode=False)
    return int(str(ended.value.code)), json.loads(report.read_text()) if report.exists() else {}


def test_a_check_that_was_stopped_is_no_wrong_input(tmp_path: Path) -> None:
    """Its exit code is 1, as that of every command that is stopped; 2 would name the log."""
    assert check(tmp_path, make_impression(0), make_engagement(0))[0] == 0
    stop = Stop()
    stop.set()
    config = CheckConfig(schema=str(tmp_path / "s.toml"), log=(str(tmp_path / "log.jsonl"),))
    with pytest.raises(UnavailableError, match="stopped"):
        check_command.check(config, stop)


def test_the_advice_about_priors_counts_requests_by_their_sampling_weight(tmp_path: Path) -> None:
    """One of three candidates is clicked in requests of weight 1; the others stand for 99 requests each."""
    lines = [make_impression(n, weight=1 if n % 2 else 99) for n in range(400)]
    lines += [make_engagement(n) for n in range(1, 400, 2)]
    _, report = check(tmp_path, *lines)
    assert report["positives"] == {"click": 200}
    assert report["base_rates"]["click"] == pytest.approx(1 / 300)
    assert [text for text in report["warnings"] if "set prior = 0.0033" in text]


def test_engagements_days_after_their_request_may_need_a_longer_window(tmp_path: Path) -> None:
    """Nothing is known of a request that closed so long ago: with `no_request`, an engagement may be late."""
    lines = [make_impression(0), make_engagement(0, 3600), make_engagement(0, 200_000)]
    _, report = check(tmp_path, *lines, make_impression(5000))
    assert report["counts"]["dead_letters"] == {"no_request": 1}
    assert "closed more than" in report["first_dead_letters"]["no_request"]["error"]
    (warning,) = [text for text in report["warnings"] if "--window" in text]
    assert "1 engagements come after" in warning and "of the 1 with no_request" in warning
    assert check(tmp_path, *lines, flags=("--window", "3d"))[1]["counts"]["folded"] == 2


def test_engagements_more_than_a_second_before_their_request_are_warned_of(tmp_path: Path) -> None:
    """Lists and engagements of two systems whose clocks or time zones differ."""
    lines = [(make_engagement(n, -600 if n < 2 else 5), make_impression(n)) for n in range(20)]
    code, report = check(tmp_path, *(line for pair in lines for line in pair))
    (warning,) = [text for text in report["warnings"] if "before their request" in text]
    assert code == 0 and warning.startswith("2 engagements") and "600 s" in warning
    lines = [(make_impression(n), make_engagement(n, -1 if n < 2 else 5)) for n in range(20)]
    _, report = check(tmp_path, *(line for pair in lines for line in pair))
    assert not [text for text in report["warnings"] if "before their request" in text]


def test_very_small_and_very_large_numbers_are_readable(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [make_impression(n) for n in range(2)]
    for line, price in zip(lines, (2.5e-5, 3.4e38), strict=True):
        line["candidates"] = [{"item_id": 1, "price": price}]
    check(tmp_path, *lines)
    assert "values 2.5e-05 to 3.4e+38, mean 1.7e+38" in " ".join(
        capfd.readouterr().out.replace("│", "").split()
    )


def test_check_reports_what_the_joiner_would_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        *(make_impression(n) for n in range(20)),
        *(make_engagement(n) for n in range(0, 20, 2)),
        make_engagement(0),
        make_engagement(3, 3600),
    ]
    code, report = check(tmp_path, *lines)
    assert code == 0 and report["errors"] == []
    counts = report["counts"]
    assert (counts["requests"], counts["samples"], counts["folded"], counts["duplicates"]) == (20, 20, 10, 1)
    assert counts["corrections"] == 1 and report["positives"] == {"click": 10}
    assert (report["engagement_delay_s"]["p50"], report["engagement_delay_s"]["p100"]) == (5, 3600)
    assert report["log"]["list_lengths"]["p50"] == 3 and report["log"]["features"]["price"]["max"] == 6.0
    assert report["warnings"] == [
        "1 engagements come after the join window and are not trained; a longer --window includes them"
    ]
    output = capfd.readouterr().out
    assert "closed by" in output and "nro price" in output


def test_check_finds_all_bad_lines_and_sets_the_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = [
        make_impression(1, time=T0 // 1000),
        "{",
        make_impression(2, candidates=[{"item_id": 1, "prize": 3}]),
        make_impression(3, weight=-1),
    ]
    code, report = check(tmp_path, make_impression(0), *bad, make_engagement(0))
    assert code == 1 and report["counts"]["skipped_lines"] == 4
    for number, text in ((2, "seconds"), (3, "log.jsonl:3: "), (4, "did you mean 'price'"), (5, "weight")):
        assert any(f"log.jsonl:{number}: " in e and text in e for e in report["errors"])
    # A table cell may be wrapped at any character.
    output = "".join(capfd.readouterr().out.replace("│", "").split())
    assert output.count("log.jsonl:4:") == 1, "each bad line is shown once"
    assert "--skip-bad" not in output, "`check` has no such option"


def test_of_many_bad_lines_the_first_are_reported_and_the_rest_counted(tmp_path: Path) -> None:
    code, report = check(tmp_path, *["{"] * 15)
    assert code == 1 and len(report["errors"]) == 12
    assert (
        "expected at least one usable impression" in report["errors"][-2]
        and report["errors"][-1] == "and 5 more lines that cannot be used"
    )


def test_an_id_written_as_text_instead_of_a_number_is_hinted_at(tmp_path: Path) -> None:
    code, report = check(tmp_path, make_impression(1), make_engagement(1, item_id="2"))
    assert code == 0 and report["counts"]["dead_letters"] == {"item_not_shown": 1}
    first = report["first_dead_letters"]["item_not_shown"]
    assert (
        first["where"].endswith("log.jsonl:2")
        and 'it did show the integer 2, and this is the text "2"' in first["error"]
    )


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_tables_are_checked_too(tmp_path: Path, capfd: pytest.CaptureFixture[str], ending: str) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    (tmp_path / f"shown.{ending}").write_text(
        f"request_id,time,user_id,item_id,price\nr,{T0},5,1,2\nr,{T0},5,2,3\n"
    )
    (tmp_path / f"done.{ending}").write_text(
        f"request_id,time,user_id,item_id,action\nr,{T0 + 1},5,1,click\n"
    )
    paths = [
        "--impressions",
        str(tmp_path / f"shown.{ending}"),
        "--engagements",
        str(tmp_path / f"done.{ending}"),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--schema", str(tmp_path / "s.toml"), *paths], standalone_mode=False)
    assert ended.value.code == 0 and "click 1" in capfd.readouterr().out


def test_a_schema_without_features_is_refused(tmp_path: Path) -> None:
    """No model can be built for it, so a replay refuses it, too."""
    (tmp_path / "s.toml").write_text('[[label]]\nname = "click"\naction = "click"\n')
    (tmp_path / "log.jsonl").write_text(json.dumps(make_impression(0)))
    config = CheckConfig(schema=str(tmp_path / "s.toml"), log=(str(tmp_path / "log.jsonl"),))
    with pytest.raises(SchemaError, match=r"s\.toml: expected at least one \[\[ro\]\] or \[\[nro\]\]"):
        check_command.check(config, Stop())
    shown = CliRunner().invoke(cli, ["schema", "show", str(tmp_path / "s.toml")])
    assert isinstance(shown.exception, SchemaError) and not shown.stdout


def test_a_log_that_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    schema = str(tmp_path / "s.toml")
    with pytest.raises(ConfigError, match="expected --log FILES, or --impressions FILES"):
        CheckConfig(schema=schema)
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: no such file"):
        CheckConfig(schema=schema, log=("nowhere.jsonl",))
    with pytest.raises(ConfigError, match=r"all end in .parquet, or all in .csv"):
        CheckConfig(schema=schema, impressions=(schema,))
    for name in ("engagements", "ignore"):  # it would be left out silently
        with pytest.raises(ConfigError, match=f"--{name}"):
            CheckConfig(schema=schema, log=(schema,), **{name: (schema,)})  # type: ignore[arg-type]
    assert check(tmp_path)[0] == 2
