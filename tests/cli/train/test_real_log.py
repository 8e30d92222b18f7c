"""`roostream train --rows torchrec` on a real log has the loss of training with rows at shards, and after a
kill the same bits as without one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from roostream.cli.data.log_archive import archive_log
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline import train_offline
from roostream.replay import ebnerd
from roostream.replay.config import ReplayConfig
from roostream.replay.detect_dataset import input_paths
from roostream.runtime.program import Stop
from roostream.schema.schema_file import load_schema
from tests.cli.train.test_offline import KillWorker, bits, rows_at, same_bits
from trainer.config import LoopConfig

_DATA = Path(os.environ.get("BENCH_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")
WEEK = _DATA / "ebnerd_week1"
FIRST_DAY, LAST_DAYS = "2023-05-18", ("2023-05-19", "2023-05-21", "2023-05-25")
USER_STRIDE = 12
EXACT = LoopConfig(exact=True, batch_requests=64, first_batch_requests=16)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not WEEK.is_dir(), reason=f"the evaluation data {WEEK.name} is not in ../shared/data"),
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the warehouse `w` of some users of the week, and the schema of the dataset."""
    pytest.importorskip("torchrec")
    folder = tmp_path_factory.mktemp("ebnerd")
    for name in ("behaviors", "history"):
        table = pq.read_table(WEEK / f"{name}.parquet")
        user = pc.cast(table["user_id"], "int64")
        some = pc.equal(pc.subtract(user, pc.multiply(pc.divide(user, USER_STRIDE), USER_STRIDE)), 0)
        pq.write_table(table.filter(some), folder / f"{name}.parquet")
    options = ebnerd.Options(
        behaviors=(str(folder / "behaviors.parquet"),), history=(str(folder / "history.parquet"),)
    )
    config = ReplayConfig(dataset="ebnerd", options=options, engine="local")
    archive_log(config, input_paths(config), str(folder / "w"))
    (folder / "schema.toml").write_text(Path(config.schema_path).read_text())
    return folder


def run_training(
    archive: Path, home: str, last_day: str, stop: Stop | None = None, **more: Any
) -> dict[str, Any]:
    config = TrainConfig(
        warehouse=str(archive / "w"),
        days=f"{FIRST_DAY}..{last_day}",
        schema=str(archive / "schema.toml"),
        home=str(archive / home),
        workers=2,
        commit_interval_ms=500,
        **more,
    )
    return train_offline(config, EXACT, stop or Stop(), lambda done, rows: None)


def test_losses_match_rows_at_shards_and_a_kill_changes_no_bit(archive: Path) -> None:
    curves: dict[str, list[tuple[int, float]]] = {"shards": [], "torchrec": []}
    exchange = {}
    for rows, curve in curves.items():
        for last_day in LAST_DAYS:
            report = run_training(archive, f"{rows}-{last_day}", last_day, rows=rows)
            curve.append((report["metrics"]["requests"], report["metrics"]["ne"]))
            exchange = report.get("exchange", exchange)
    print("requests and NE:", curves, "exchange:", exchange)
    assert [n for n, _ in curves["torchrec"]] == [n for n, _ in curves["shards"]]
    assert curves["torchrec"][0][0] < curves["torchrec"][1][0] < curves["torchrec"][2][0]
    assert [ne for _, ne in curves["torchrec"]] == pytest.approx([ne for _, ne in curves["shards"]], rel=1e-4)
    assert 0 < exchange["exchanged_bytes"] < exchange["impression_bytes"]

    home, last_day = f"torchrec-{LAST_DAYS[-1]}", LAST_DAYS[-1]
    kills = KillWorker(archive / "killed")
    run_training(archive, "killed", last_day, stop=kills, rows="torchrec")
    assert kills.killed
    schema = load_schema(archive / "schema.toml")
    assert same_bits(archive, home, "killed")
    undisturbed = bits(rows_at(archive, home, schema))
    assert undisturbed == bits(rows_at(archive, "killed", schema)) and len(undisturbed) > 500
