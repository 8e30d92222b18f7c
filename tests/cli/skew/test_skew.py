"""`roostream inspect skew` scores logged lists of candidates again. It separates lists that were scored as
logged from lists with a skew between scored and logged features, and from lists that cannot be scored
again."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from infra.home import Home
from roostream.cli.main import cli
from roostream.cli.skew.commit_states import CommitStates
from roostream.cli.skew.score_comparison import TOLERANCE, ScoreComparison, compare_scores
from roostream.cli.skew.scored_lists import LoggedList, newest, of_file, of_records, sample_of
from roostream.errors import CheckpointError, ConfigError, RoostreamError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import IMPRESSIONS, SAMPLES
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.cli.skew.skew_cases import T0, ScoringHome
from trainer.saved_batch import SavedBatch, encode

SECOND = 1000


@pytest.fixture
def home(tmp_path: Path) -> ScoringHome:
    """A home with one commit at T0 and trained rows of items 1 to 3."""
    home = ScoringHome(tmp_path / "home")
    home.push(1, 2, 3)
    home.commit(T0)
    return home


def run_command(home: ScoringHome, *arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(
        cli, ["inspect", "skew", *map(str, arguments), "--home", str(home.root), "--json"]
    )
    if isinstance(result.exception, RoostreamError):
        raise result.exception
    return result.exit_code, json.loads(result.stdout)


def compare_by_request(home: ScoringHome, path: Path) -> dict[str, ScoreComparison]:
    found = compare_scores(CommitStates(home.store, home.root), of_file(path))
    return {one.logged.request_id: one for one in found}


def test_lists_that_were_scored_as_logged_differ_only_by_rounding(home: ScoringHome) -> None:
    home.rank("a", T0 + SECOND)
    home.push(9)
    home.commit(T0 + 10 * SECOND)
    home.rank("b", T0 + 11 * SECOND, items=(3, 2, 77))
    home.commit(T0 + 20 * SECOND)
    code, report = run_command(home, home.close())
    assert (
        code == 0
        and report["share_within"] == 1.0
        and report["largest"] <= TOLERANCE
        and report["lists"] == 2
    )
    assert {name: counts["within"] for name, counts in report["versions"].items()} == {"1-1": 1, "1-2": 1}
    assert report["differing"] == [] and report["verdicts"] == {"within": 2}


@pytest.mark.parametrize(
    ("logged", "explanation"),
    [
        ({"basket": 4.0}, "it was scored with 'basket' = 40, but the log has 4"),
        ({"basket": None}, "it was scored with 'basket' = 40, but the log has"),
        (
            {"price": np.array([1.0, 50.0, 9.0], np.float32)},
            "it was scored with 'price' of item 2 = 5, but the log has 50",
        ),
    ],
)
def test_a_feature_that_changed_between_serving_and_log_is_found(
    home: ScoringHome, logged: dict[str, Any], explanation: str
) -> None:
    home.rank("good", T0 + SECOND)
    home.rank("planted", T0 + 2 * SECOND, logged=logged)
    home.commit(T0 + 10 * SECOND)
    code, report = run_command(home, home.close())
    assert code == 1 and report["verdicts"] == {"within": 1, "skew": 1} and report["share_within"] == 0.5
    (one,) = report["differing"]
    assert one["request_id"] == "planted" and one["verdict"] == "skew" and one["version"] == "1-1"
    assert one["largest"] > 10 * TOLERANCE and len(one["differences"]) == 3
    assert one["why"].startswith(explanation), one["why"]


def test_a_feature_that_only_the_log_has_is_reported(home: ScoringHome) -> None:
    home.rank("planted", T0 + SECOND, scored={"basket": None}, logged={"basket": 40.0})
    home.commit(T0 + 10 * SECOND)
    one = compare_by_request(home, home.close())["planted"]
    assert one.verdict == "skew" and one.why == "it was scored without 'basket', which the log has"


def test_a_difference_of_several_features_is_left_unexplained(home: ScoringHome) -> None:
    home.rank(
        "planted",
        T0 + SECOND,
        logged={"basket": 4.0, "hour": 1.0, "price": np.array([9.0, 1.0, 300.0], np.float32)},
    )
    home.commit(T0 + 10 * SECOND)
    one = compare_by_request(home, home.close())["planted"]
    assert one.verdict == "skew" and one.why.startswith("no single float")


def test_rows_that_changed_between_the_commits_are_reported_and_are_no_skew(home: ScoringHome) -> None:
    home.push(2, by=-0.5)
    home.rank("between", T0 + SECOND)  # scored with a row that is in no commit
    home.push(2, by=-0.5)
    home.rank("after", T0 + 9 * SECOND)  # scored with the rows of the next commit
    home.commit(T0 + 10 * SECOND)
    found = compare_by_request(home, home.close())
    assert found["between"].verdict == "rows" and found["between"].num_changed == 1
    assert "changed rows explain" in found["between"].why
    assert found["after"].verdict == "within" and found["after"].rows_of == 2


def test_skew_is_found_beside_changes_of_rows(home: ScoringHome) -> None:
    home.push(2, by=-0.01)
    home.rank("planted", T0 + SECOND, logged={"hour": -900.0, "basket": 1e5})
    home.commit(T0 + 10 * SECOND)
    one = compare_by_request(home, home.close())["planted"]
    assert one.verdict == "skew" and one.num_changed == 1


def test_without_a_second_commit_a_difference_is_not_called_a_skew(home: ScoringHome) -> None:
    home.rank("planted", T0 + SECOND, logged={"basket": 4.0})
    one = compare_by_request(home, home.close())["planted"]
    assert one.verdict == "rows" and "only one commit around it" in one.why


def test_lists_that_cannot_be_scored_again_have_a_reason(home: ScoringHome) -> None:
    home.rank("gone", T0 + SECOND)
    home.rank("pages", T0 + SECOND)
    home.rank("schema", T0 + SECOND)
    home.rank("unscored", T0 + SECOND)
    home.rank("odd", T0 + SECOND)
    home.commit(T0 + 10 * SECOND)
    lists = {one.request_id: one for one in of_file(home.close())}
    changed: list[LoggedList] = []
    for name, one in lists.items():
        message = pb.Sample.FromString(one.record.value[2:])
        if name == "odd":
            del message.item_ids[:]
        changes: dict[str, Any] = {
            "gone": {"version": "1-77"},
            "pages": {"num_pages": 2},
            "schema": {"fingerprint": 5},
            "unscored": {"served": False},
            "odd": {"record": one.record._replace(value=wire.encode(wire.SAMPLE, message))},
        }[name]
        changed.append(one._replace(**changes))
    found = {
        one.logged.request_id: one for one in compare_scores(CommitStates(home.store, home.root), changed)
    }
    assert {name: one.verdict for name, one in found.items()} == {
        **{n: n for n in lists if n != "odd"},
        "odd": "unreadable",
    }
    assert found["gone"].why == "version 1-77 was deleted: the store has commits 1 to 2"
    assert "2 pages" in found["pages"].why and "0000000000000005" in found["schema"].why


def test_rows_that_are_not_in_the_home_are_reported(home: ScoringHome, tmp_path: Path) -> None:
    home.rank("a", T0 + SECOND)
    lists = of_file(home.close())
    (one,) = compare_scores(CommitStates(home.store, tmp_path), lists)
    assert one.verdict == "gone" and "expected segments in shard-0/segments of a home" in one.why


def test_rows_are_read_while_the_shard_runs(home: ScoringHome) -> None:
    home.rank("a", T0 + SECOND)
    record = home.served[0]
    logged = list(
        of_records([Record(IMPRESSIONS, 0, 0, record.timestamp_ms, record.key, record.value)], "topic")
    )
    (one,) = compare_scores(CommitStates(home.store, home.root), logged)
    assert one.verdict == "within", "the shard still has its segments open"
    home.close()


def test_saved_batches_are_lists_too_and_other_files_are_reported(home: ScoringHome, tmp_path: Path) -> None:
    home.rank("a", T0 + SECOND)
    record = home.served[0]
    sample = sample_of(
        Record(IMPRESSIONS, 0, 0, T0, record.key, b""),
        pb.Impression.FromString(record.value[2:]),
        num_tasks=2,
    )
    records = (
        Record(SAMPLES, 0, 5, T0, record.key, wire.encode(wire.SAMPLE, sample)),
        Record(SAMPLES, 0, 6, T0, None, b"?"),
    )
    about: dict[str, Any] = dict.fromkeys(("reason", "manifest", "checksum", "schema"), "")
    about |= {"findings": (), "incarnation": 1, "worker": 0, "step": 1, "time_ms": T0, "left_out": 0}
    saved = SavedBatch(records=records, **about)
    (tmp_path / "x.batch").write_bytes(encode(saved))
    home.close()
    code, report = run_command(home, tmp_path / "x.batch")
    assert code == 0 and report["verdicts"] == {"within": 1}
    sample.header.time_ms -= SECOND
    sample.header.model_version = ""
    older = records[0]._replace(value=wire.encode(wire.SAMPLE, sample))
    (tmp_path / "y.batch").write_bytes(encode(dataclasses.replace(saved, records=(older,))))
    _, report = run_command(home, tmp_path / "x.batch", tmp_path / "y.batch", "--lists", "1")
    assert report["verdicts"] == {"within": 1}, "the newest list is in the first file"
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="expected a segment of a feature log or a saved batch"):
            of_file(path)


def test_the_newest_lists_of_a_topic_are_taken_over_all_partitions(home: ScoringHome) -> None:
    for n in range(6):
        home.rank(f"r{n}", T0 + n * SECOND)
    home.close()
    records = []
    for n, record in enumerate(home.served):
        message = pb.Impression.FromString(record.value[2:])
        sample = sample_of(Record(IMPRESSIONS, 0, 0, T0, record.key, b""), message, num_tasks=2)
        value = wire.encode(wire.SAMPLE, sample)
        records.append(Record(SAMPLES, n % 2, n // 2, record.timestamp_ms, record.key, value))
    reader = MemoryConsumer([(SAMPLES, 0), (SAMPLES, 1), (SAMPLES, 2)], records)
    assert [one.request_id for one in newest(reader, 3, "k")] == ["r3", "r4", "r5"]
    assert [one.request_id for one in newest(reader, 100, "k")] == [f"r{n}" for n in range(6)]
    assert newest(MemoryConsumer([(SAMPLES, 0)]), 3, "k") == []

    class Silent(MemoryConsumer):
        def at_end(self) -> bool:
            return False

    with pytest.raises(UnavailableError, match="has not answered"):
        newest(Silent([(SAMPLES, 0), (SAMPLES, 1), (SAMPLES, 2)], records), 100, "k")


def test_the_address_of_a_stopped_stack_is_not_read(home: ScoringHome) -> None:
    """Another stack may have its ports now, and lists of that one say nothing of these commits."""
    home.commit(T0)
    home.close()
    described = {"kafka": "127.0.0.1:1", "prefix": "", "partitions": 1, "programs": {"kafka": {}}}
    Home(home.root).write_stack({**described, "supervisor_pid": os.getpid()})
    with pytest.raises(ConfigError, match="no stack runs"):
        run_command(home)


def test_without_a_stack_or_commits_the_missing_option_is_named(home: ScoringHome, tmp_path: Path) -> None:
    home.close()
    with pytest.raises(ConfigError, match=r"its --home, or segments"):
        run_command(home)
    with pytest.raises(CheckpointError, match="commit in this store, got none"):
        CommitStates(FileStore(tmp_path / "empty"), tmp_path)
    damaged = tmp_path / "home" / "store" / manifests.manifest_name(1)
    damaged.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="got none"):
        CommitStates(home.store, home.root)


def test_a_run_that_judged_no_list_does_not_report_success(home: ScoringHome) -> None:
    home.rank("a", T0 + SECOND)
    path = home.close()
    shutil.rmtree(home.root / "shard-0" / "segments")
    code, report = run_command(home, path)
    assert code == 1 and report["scored_again"] == 0
    assert report["versions"]["1-1"]["largest"] is None, "nothing was measured"
    text = CliRunner().invoke(cli, ["inspect", "skew", str(path), "--home", str(home.root)]).output
    assert "0 of 1 lists scored again" in text and "largest" not in text


def test_the_report_is_printed_as_a_table(home: ScoringHome) -> None:
    home.rank("good", T0 + SECOND)
    home.rank("planted", T0 + 2 * SECOND, logged={"basket": 4.0})
    home.commit(T0 + 10 * SECOND)
    path = home.close()
    result = CliRunner().invoke(cli, ["inspect", "skew", str(path), "--home", str(home.root)])
    assert result.exit_code == 1
    assert all(text in result.output for text in ("50.00% of 2 lists", "SKEW", "'basket' = 40"))
