"""`roostream placement`: its reports, the arguments that it rejects, and that it reads a plan that it
wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from param_server.placement.profiles import save_profiles
from roostream.cli.checkpoint.torchrec_collection import weight_name, write_tensors
from roostream.cli.main import cli
from roostream.errors import ConfigError
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.store_identity import init_store
from roostream.schema.registry import to_toml
from tests.param_server.placement.test_profiles import make_profiler
from tests.trainer import samples


@pytest.fixture
def store_arguments(tmp_path: Path) -> list[str]:
    """Return the arguments `--store` and `--schema` for a store with profiles of the tables."""
    (tmp_path / "s.toml").write_text(to_toml(samples.schema()))
    init_store(tmp_path / "store")
    save_profiles(FileStore(tmp_path / "store"), make_profiler().profiles, SystemClock().now_ms())
    return ["--store", str(tmp_path / "store"), "--schema", str(tmp_path / "s.toml")]


def placement(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["placement", *arguments], env={"COLUMNS": "200"})


def test_profiles_are_reported_by_feature(store_arguments: list[str]) -> None:
    result = placement("profile", *store_arguments)
    assert result.exit_code == 0 and "table item (4 wide)" in result.output and "5 batches" in result.output
    profiles = json.loads(placement("profile", *store_arguments, "--json").stdout)
    assert profiles["user"]["examples"] == 40


def test_a_plan_shows_its_imbalance_and_the_basis_of_its_times(store_arguments: list[str]) -> None:
    result = placement("plan", *store_arguments, "--owners", "4")
    assert result.exit_code == 0
    for text in ("imbalance", "the lower bound", "assumed constants"):
        assert text in result.output


def test_a_table_without_a_profile_is_spread_over_all_owners(
    store_arguments: list[str], tmp_path: Path
) -> None:
    init_store(tmp_path / "empty")
    result = placement("plan", "--store", str(tmp_path / "empty"), *store_arguments[2:], "--owners", "4")
    assert result.output.count("never counted") == 2 and result.output.count("4 row pieces") == 2
    assert (
        "none: a worker"
        in placement("profile", "--store", str(tmp_path / "empty"), *store_arguments[2:]).output
    )


def test_a_table_is_explained(store_arguments: list[str]) -> None:
    result = placement("explain", "item", *store_arguments, "--owners", "4")
    assert "per batch" in result.output and "2 row shards" in result.output
    with pytest.raises(ConfigError, match="expected a table of the schema, got 'itm'; did you mean 'item'"):
        CliRunner().invoke(
            cli, ["placement", "explain", "itm", *store_arguments, "--owners", "4"], catch_exceptions=False
        )


def test_show_compares_the_plan_with_whole_tables_on_owners(store_arguments: list[str]) -> None:
    result = placement("show", *store_arguments, "--owners", "4")
    assert result.exit_code == 0
    imbalances = [float(text) for text in re.findall(r"imbalance ([\d.]+) of bytes", result.output)]
    before, spread, *_, after = imbalances
    assert before >= 2.0 > after >= spread == 1.0, "with whole tables, two of the four owners are idle"
    assert re.search(r"exchanged.*expanded impressions \([\d.]+ times\)", result.output)


def test_a_plan_is_written_in_torchrecs_terms(store_arguments: list[str], tmp_path: Path) -> None:
    out, rows = tmp_path / "plan.json", ["--rows", "item=40", "--rows", "user=9"]
    with pytest.raises(
        ConfigError, match="expected pieces of a multiple of 4 columns, as FBGEMM has them, got 2"
    ):
        narrow = ["plan", *store_arguments, "--owners", "4", *rows, "--write-torchrec", str(out)]
        CliRunner().invoke(cli, ["placement", *narrow], catch_exceptions=False)
    schema = Path(store_arguments[-1])
    schema.write_text(schema.read_text().replace("dim = 2", "dim = 4"))
    result = placement(
        "plan", *store_arguments, "--owners", "4", *rows, "--write-torchrec", str(out), "--module", "sparse"
    )
    assert result.exit_code == 0 and "imbalance" in result.output
    written = json.loads(out.read_text())
    assert written["module"] == "sparse" and sorted(written["tables"]) == ["item", "user"]
    assert sum(shard["sizes"][0] for shard in written["tables"]["item"]["shards"]) == 40
    collection = tmp_path / "rows.safetensors"
    rows = {weight_name(name): np.zeros((7, 4), np.float32) for name in ("item", "user")}
    write_tensors({collection: rows})
    again = tmp_path / "again.json"
    arguments = [
        "plan",
        *store_arguments,
        "--owners",
        "4",
        "--collection",
        str(collection),
        "--write-torchrec",
        str(again),
    ]
    assert placement(*arguments).exit_code == 0
    assert sum(shard["sizes"][0] for shard in json.loads(again.read_text())["tables"]["user"]["shards"]) == 7
    with pytest.raises(ConfigError, match="file"):
        CliRunner().invoke(cli, ["placement", *arguments], catch_exceptions=False)
    with pytest.raises(ConfigError, match="expected how many rows each table has, got none for user, item"):
        CliRunner().invoke(
            cli, ["placement", *arguments[:-4], "--write-torchrec", "x.json"], catch_exceptions=False
        )


def test_two_plans_are_compared(store_arguments: list[str], tmp_path: Path) -> None:
    files = []
    for owners in ("2", "8"):
        files.append(tmp_path / f"{owners}.json")
        files[-1].write_text(
            placement("plan", *store_arguments, "--owners", owners, "--json", "--columns", "user=2").output
        )
    assert "imbalance (bytes)" in placement("diff", *map(str, files)).output
    assert "the same" in placement("diff", str(files[0]), str(files[0])).output


def test_a_change_beyond_the_owners_that_are_printed_is_a_change(tmp_path: Path) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, last_owner in zip(files, (9, 20), strict=True):
        owners = [*range(9), last_owner]
        pieces = [{"table": "item", "kind": "row", "owner": o, "number": n} for n, o in enumerate(owners)]
        file.write_text(json.dumps({"bytes_imbalance": 1.0, "pieces": pieces}))
    output = placement("diff", *map(str, files)).output
    assert "1 shards have other owners" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "item"], "--rows: expected TABLE=N"),
        (["--rows", "item="], "--rows: expected TABLE=N"),
        (["--columns", "item=2"], "keeps one state a row"),
        (["--costs", "absent.json"], "measured constants"),
        (["--rows", "item=9000000000", "--memory", "1"], "owners suffice"),
        (["--rows", "itm=9"], "with a table of the schema, got 'itm=9'; did you mean 'item'"),
        (["--rows", "item=0"], "got 'item=0'"),
        (["--rows", "item=" + "9" * 5000], "above 0"),
        (["--columns", "user=8"], "expected column pieces that divide dim = 2, got 8"),
    ],
)
def test_an_impossible_plan_is_reported_in_one_sentence(
    store_arguments: list[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(
            cli, ["placement", "plan", *store_arguments, "--owners", "4", *arguments], catch_exceptions=False
        )


def test_a_binary_file_of_constants_is_rejected(store_arguments: list[str], tmp_path: Path) -> None:
    for content, message in (
        (b"\xff\xfe\x00", "measured constants, got bytes"),
        (b"[" * 100_000, "got something"),
    ):
        (tmp_path / "costs.json").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            arguments = ["plan", *store_arguments, "--owners", "4", "--costs", str(tmp_path / "costs.json")]
            CliRunner().invoke(cli, ["placement", *arguments], catch_exceptions=False)


def test_a_file_that_is_no_plan_is_rejected(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("[]")
    for text in (
        '{"pieces": []}',
        '{"pieces": [{"table": "item"}], "bytes_imbalance": 1}',
        '{"pieces": 3}',
        "\\xff",
    ):
        other.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json: expected"):
            CliRunner().invoke(cli, ["placement", "diff", str(other), str(other)], catch_exceptions=False)
    for file in (other, tmp_path / "absent.json"):
        with pytest.raises(ConfigError, match="expected"):
            CliRunner().invoke(cli, ["placement", "diff", str(file), str(file)], catch_exceptions=False)
