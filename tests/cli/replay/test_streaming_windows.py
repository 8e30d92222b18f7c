"""`--streaming-window`: a replay trains on one window of event time and is evaluated on the next. Tests of
the windows, and complete replays with them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roostream.cli.replay.report_page import page_of
from roostream.cli.replay.streaming_windows import SampleWindows, StreamingEvaluation, Window
from roostream.errors import ConfigError
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.cli.replay.test_local_replay import options_of, replay, write_week_log

DAY_MS, SECOND_MS = 86_400_000, 1000


@pytest.fixture(scope="module")
def news_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("news")
    write_week_log(folder)
    (folder / "small.toml").write_text("width = 8\n")
    return folder


def sample(time_ms: int, close_ms: int) -> Record:
    message = pb.Sample(header=pb.Header(request_id=str(time_ms), time_ms=time_ms), close_ms=close_ms)
    return Record("samples", 0, 0, close_ms, b"", wire.encode(wire.SAMPLE, message))


def summaries(windows: list[Window]) -> list[tuple[int, int, int, list[int]]]:
    """Return number, begin, end and close times of each window."""
    return [(w.number, w.begin_ms, w.end_ms, [r.timestamp_ms for r in w.records]) for w in windows]


def test_a_window_is_complete_when_all_its_requests_must_have_closed() -> None:
    windows = SampleWindows(length_ms=100, join_window_ms=30)
    assert windows.add(sample(1000, 1030)) == []
    assert windows.add(sample(1100, 1110)) == [], "this sample closed early and is of the next window"
    assert windows.add(sample(1099, 1129)) == []
    assert summaries(windows.add(sample(1101, 1130))) == [(0, 1000, 1100, [1030, 1129])]
    assert summaries(windows.take_remaining()) == [(1, 1100, 1200, [1110, 1130])]


def test_a_label_that_a_sample_does_not_have_counts_in_no_metric() -> None:
    old, new = (
        schema_from_dict({"nro": [{"name": "x"}], "label": [{"name": n, "action": n} for n in names]})
        for names in (["click"], ["click", "buy"])
    )
    message = pb.Sample(
        header=pb.Header(request_id="a", time_ms=5, schema=old.fingerprint),
        sample_id=1,
        close_ms=9,
        item_ids=[1, 2],
        labels=[1.0, 0.0],
        parts=[pb.Part(num_rows=2)],
    )
    record = Record("samples", 0, 0, 9, b"", wire.encode(wire.SAMPLE, message))
    writers = {schema.fingerprint: schema for schema in (old, new)}
    evaluation = StreamingEvaluation(
        new, Decoder(new, writers.get), lambda batch: np.full(batch.label_BT.shape, 0.5, np.float32)
    )
    evaluation.evaluate(Window(0, 0, 10, [record]), 0)
    tasks = evaluation.report()["overall"]["tasks"]
    assert {name: task["candidates"] for name, task in tasks.items()} == {"click": 2, "buy": 0}  # type: ignore[attr-defined]


def test_windows_without_requests_are_left_out_and_keep_their_numbers() -> None:
    windows = SampleWindows(length_ms=100, join_window_ms=30)
    assert windows.add(sample(1000, 1030)) == []
    assert summaries(windows.add(sample(1350, 1380))) == [(0, 1000, 1100, [1030])]
    assert summaries(windows.take_remaining()) == [(3, 1300, 1400, [1380])]


def test_a_sample_that_closes_after_its_window_belongs_to_the_oldest_open_one() -> None:
    windows = SampleWindows(length_ms=100, join_window_ms=30)
    assert windows.add(sample(1000, 1030)) == []
    assert len(windows.add(sample(1110, 1140))) == 1
    assert windows.add(sample(1090, 1150)) == []
    assert summaries(windows.take_remaining()) == [(1, 1100, 1200, [1140, 1150])]


def test_a_window_is_scored_with_the_weights_trained_before_it(news_folder: Path) -> None:
    """The second window has the metrics of a replay whose weights are frozen when that window begins."""
    streaming = replay(news_folder, streaming_window_ms=DAY_MS)["streaming"]
    (second,) = streaming["windows"]
    frozen = replay(
        news_folder, freeze_weights_at=str(second["begin_ms"]), measure_from=str(second["begin_ms"])
    )
    assert second["window"] == 1 and second["requests"] > 30
    assert second["trained_requests"] + second["requests"] == 120
    expected = frozen["metrics"]["measured"]
    assert second["candidates"] == expected["candidates"] and second["requests"] == expected["requests"]
    for name in ("auc", "ne", "request_auc", "calibration"):
        assert second["tasks"]["click"][name] == pytest.approx(expected["tasks"]["click"][name], rel=1e-5)


def test_windows_of_one_request_are_scored_as_in_progressive_validation(news_folder: Path) -> None:
    report = replay(news_folder, streaming_window_ms=SECOND_MS, batch_requests=1)
    windows = report["streaming"]["windows"]
    assert 100 < len(windows) < 120, "some requests share a second, and the first is not evaluated"
    one_by_one = replay(news_folder, batch_requests=1, measure_from=str(windows[0]["first_ms"]))
    together, measured = report["streaming"]["overall"], one_by_one["metrics"]["measured"]
    assert together["requests"] == measured["requests"]
    assert together["ne"] == pytest.approx(measured["ne"], rel=0.01)


def test_everything_is_trained_and_accounted_for_and_windows_are_averaged(news_folder: Path) -> None:
    report = replay(news_folder, streaming_window_ms=DAY_MS // 4)
    counts, streaming = report["counts"], report["streaming"]
    assert report["accounted"] and counts["predicted"] == counts["samples"] == 120
    windows = streaming["windows"]
    assert [w["window"] for w in windows] == list(range(1, 8)) and streaming["mean"]["windows"] == 7
    known = [w["auc"] for w in windows if w["auc"] is not None]
    assert streaming["mean"]["auc"] == pytest.approx(sum(known) / len(known))
    assert streaming["overall"]["requests"] == sum(w["requests"] for w in windows)
    for before, after in itertools.pairwise(windows):
        assert after["trained_requests"] == before["trained_requests"] + before["requests"]
        assert before["end_ms"] == after["begin_ms"] and before["last_ms"] < after["first_ms"]
    page = page_of("replay", report, {})
    assert len(re.findall(r"<td>window \d from ", page)) == 7 and "mean of the windows" in page


def test_each_of_several_models_is_evaluated(news_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("width = 16\n")
    small = str(news_folder / "small.toml")
    both = replay(news_folder, streaming_window_ms=DAY_MS, model=(small, str(other)))
    alone = replay(news_folder, streaming_window_ms=DAY_MS, model=(str(other),))
    first, second = (model["streaming"] for model in both["models"])
    assert first == both["streaming"] != second and second == alone["streaming"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "stack"}, "'streaming_window_ms': expected --engine local"),
        ({"as_served": True}, "expected --streaming-window or --as-served, got both"),
        ({"early_close_ms": 1}, "expected --streaming-window or --early-close, got both"),
    ],
)
def test_settings_that_change_when_requests_are_scored_are_rejected(
    news_folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(news_folder, options=options_of(news_folder), streaming_window_ms=DAY_MS, **settings)
