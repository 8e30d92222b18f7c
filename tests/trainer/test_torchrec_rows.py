"""Rows in TorchRec's sharded collections: they are trained with the same results as by shards, and they can
move to shards and back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from param_server.embedding_table import Keys
from param_server.gradient_barrier import sum_pushes
from param_server.placement.plan import CostModel, PlannedTable, imbalance, loads, round_robin
from param_server.server import ShardRpcHandler
from param_server.table import GradientPush
from roostream.errors import ConfigError, SchemaError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.clock import SystemClock
from roostream.runtime.rpc.server import RpcServer
from roostream.schema.schema_file import schema_from_dict
from tests.param_server.shard_support import started_shard
from tests.trainer import torchrec_row_workers
from tests.trainer.torchrec_row_workers import CLIP, WORKERS, batch, schema

pytest.importorskip("torchrec")

from trainer.config import WorkerConfig
from trainer.process_group import is_out_of_memory
from trainer.row_home import OwnShard
from trainer.torchrec_plan import TablePlacement, pieces_of
from trainer.torchrec_rows import SlotIndex, TorchRecRows, check_tables, read_placement
from trainer.worker_program import initial_placement

State = dict[tuple[int, int], tuple[np.ndarray, np.ndarray, int]]
RUNS = {
    "rows": ["rows"],
    "mixed": ["mixed"],
    "rows-rows": ["rows", "rows"],
    "rows-mixed": ["rows", "mixed"],
    "expired": ["rows"],  # all rows expire in a commit after half of the steps
    "late": ["rows"],  # trains only the second half of the steps
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, State]:
    """For each run, the row, the optimizer state and the time of every key in both workers' shards."""
    folder = tmp_path_factory.mktemp("torchrec")
    run_workers(folder, list(RUNS))
    found: dict[str, State] = {name: {} for name in RUNS}
    for rank in range(WORKERS):
        arrays = np.load(folder / f"out-{rank}.npz")
        for name, state in found.items():
            add_state(state, {key: arrays[key] for key in arrays if key.startswith(f"{name}/")})
    return found


def run_workers(folder: Path, runs: list[str]) -> None:
    (folder / "runs.json").write_text(json.dumps({name: RUNS[name] for name in runs}))
    command = [sys.executable, "-m", "tests.trainer.torchrec_row_workers"]
    ranks = [subprocess.Popen([*command, str(rank), str(folder)]) for rank in range(WORKERS)]
    try:
        assert [rank.wait(240) for rank in ranks] == [0] * WORKERS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def add_state(state: State, arrays: Mapping[str, np.ndarray]) -> None:
    """Add the rows of a shard. `arrays` come from `torchrec_row_workers.state`; a prefix of their names is
    ignored."""
    by_name = {key.partition("/")[2] if key.count("/") > 1 else key: array for key, array in arrays.items()}
    for stack in schema().stacks:
        columns = (by_name[f"{stack}/{what}"] for what in ("table", "id", "rows", "state", "stamp"))
        for table, id_, row, row_state, stamp in zip(*columns, strict=True):
            assert (int(table), int(id_)) not in state, "a row must have one owner"
            state[int(table), int(id_)] = row, row_state, int(stamp)


@pytest.fixture(scope="module")
def trained_by_shards() -> State:
    """The result of the same steps with a shard's update rules."""
    shard = started_shard(schema=schema())
    for step in range(12):
        if step % 4 == 1:
            continue
        pushes = []
        for worker in range(WORKERS):
            lookup, gradients = batch(worker, step)
            parts = [
                (shard.tables[n], Keys(stack.table_U, stack.id_U), gradients[n])
                for n, stack in lookup.stacks.items()
            ]
            pushes.append(GradientPush(worker, step, 100 * step, 0, 0, parts, step, WORKERS, CLIP))
        for table, keys, gradient_UD in sum_pushes(pushes).parts:
            table.reserve(len(keys))
            table.push(keys, gradient_UD, 100 * step)
    out: State = {}
    for table in shard.tables.values():
        for n in table.index.flagged(1).tolist():
            key = int(table.index.table_N[n]), int(table.index.id_N[n])
            out[key] = table.embeddings.rows_ND[n], table.state_NA[n], int(table.stamp_ms_N[n])
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", ["rows", "mixed"])
def test_rows_and_state_equal_those_of_the_shards_update_rules(
    trained: Mapping[str, State], trained_by_shards: State, run: str
) -> None:
    """The tables use Adagrad, row-wise Adagrad and Adam. In `mixed`, some tables are whole or in column
    pieces."""
    found = trained[run]
    assert found.keys() == trained_by_shards.keys() and len(found) > 4 * 2000, (
        "keys that are pulled and never pushed must have no row"
    )
    names = {t.id: t.name for t in schema().tables}
    for key, (row, state, stamp) in trained_by_shards.items():
        if run == "mixed" and names[key[0]] == "brand":
            continue  # with column pieces, the norm of each piece is clipped instead of the row's
        np.testing.assert_allclose(found[key][0], row, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found[key][1], state, rtol=1e-6, atol=1e-6)
        assert found[key][2] == stamp


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("run", "undisturbed"), [("rows-rows", "rows"), ("rows-mixed", "rows")])
def test_rows_that_moved_to_shards_and_back_continue_bit_equal(
    trained: Mapping[str, State], run: str, undisturbed: str
) -> None:
    brand = schema().table_by_name["brand"].id
    compared = {key for key in trained[undisturbed] if run == "rows-rows" or key[0] != brand}
    assert trained[run].keys() == trained[undisturbed].keys()
    for key in compared:
        for mine, other in zip(trained[run][key][:2], trained[undisturbed][key][:2], strict=True):
            assert mine.tobytes() == other.tobytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_that_expired_in_a_commit_start_from_their_initial_values(trained: Mapping[str, State]) -> None:
    assert trained["expired"].keys() == trained["late"].keys() and len(trained["late"]) > 100
    assert bits(trained["expired"]) == bits(trained["late"]) != bits(trained["rows"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_shards_of_a_stack_get_the_same_rows(trained: Mapping[str, State], tmp_path: Path) -> None:
    """Two worker processes save their rows to three shards of this process."""
    shards = [started_shard(index=index, num_shards=3, schema=schema()) for index in range(3)]
    servers = [RpcServer(ShardRpcHandler(shard).handle).start() for shard in shards]
    try:
        (tmp_path / "shards.json").write_text(json.dumps([server.address for server in servers]))
        run_workers(tmp_path, ["rows"])
    finally:
        for server in servers:
            server.stop()
    found: State = {}
    for shard in shards:
        add_state(found, dict(torchrec_row_workers.state(shard)))
    assert bits(found) == bits(trained["rows"])


def bits(rows: State) -> dict[tuple[int, int], tuple[bytes, bytes, int]]:
    return {key: (row.tobytes(), state.tobytes(), stamp) for key, (row, state, stamp) in rows.items()}


def keys_of(name: str, *ids: int) -> Keys:
    table = schema().table_by_name[name].id
    return Keys(np.full(len(ids), table, np.uint32), np.array(ids, np.int64))


def test_slots_are_unique_survive_growth_and_are_reused() -> None:
    tables = schema().tables
    index = SlotIndex(tables, [1 if t.name == "item" else 3 for t in tables], BucketMap.modulo(64, 3))
    first = keys_of("user", *range(-50, 5000))
    index.add(first)
    index.add(keys_of("item", *range(2000)))
    number_M = index.keys.find(first)
    assert len({*index.slots(number_M).tolist()}) == len(first)
    user = tables.index(schema().table_by_name["user"])
    owner_M, rows = index.slots(number_M) // (index.rows(user) // 3), index.rows(user)
    assert (owner_M == index.home_N[number_M]).all(), "a row must be at the owner of its bucket"
    index.remove(keys_of("user", 7, 8))
    assert not len(index.add(first.take(np.arange(5))))
    again = index.add(keys_of("user", 7, 8))
    assert len({*index.slots(index.keys.find(first)).tolist()}) == len(first) and len(again) == 2
    assert index.rows(user) == rows


def test_a_table_that_torchrec_cannot_hold_is_refused_with_a_remedy() -> None:
    for name, dim, wrong in (("x", 6, "multiple of 4"), ("items", 8, "another name")):
        odd = {"tables": {name: {"dim": dim}}, "label": [{"name": "click", "action": "click"}]}
        with pytest.raises(SchemaError, match=rf"'{name}'.*{wrong}.*rows = shards"):
            check_tables(schema_from_dict(odd), {})
    with pytest.raises(SchemaError, match=r"'topic'.*one state a row"):
        check_tables(schema(), {"topic": TablePlacement("column_wise", (0,))})


class FullPeers:
    """`RowPeers` of a worker whose memory is full."""

    index = 0

    def connect(self) -> NoReturn:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 1073741824 bytes."
        )


def test_a_worker_without_memory_is_not_taken_for_a_lost_connection() -> None:
    """No restore would help: training must be on hold."""
    rows = TorchRecRows(schema(), OwnShard(started_shard(schema=schema())))
    rows.meet(FullPeers())
    rows.set_incarnation(1)
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        rows.pull(batch(0, 0)[0])
    assert is_out_of_memory(raised.value)


@pytest.fixture
def plan_for_three(tmp_path: Path) -> str:
    """Path of a plan with table `item` at worker 2."""
    shard = {"rank": 2, "offsets": [0, 0], "sizes": [9, 8]}
    tables = {"item": {"sharding_type": "table_wise", "shards": [shard]}}
    path = tmp_path / "plan"
    path.write_text(json.dumps({"format": 1, "owners": 3, "module": "", "tables": tables}))
    return str(path)


def test_a_placement_that_cannot_be_read_is_refused(tmp_path: Path, plan_for_three: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_placement(str(tmp_path / "nowhere"), schema(), 2)
    with pytest.raises(ConfigError, match=r"'item'.*workers = 2"):
        read_placement(plan_for_three, schema(), 2)
    assert read_placement(plan_for_three, schema(), 3)["item"] == TablePlacement("table_wise", (2,))


def written_plan(path: Path, table: str, kind: str, *shards: tuple[int, list[int], list[int]]) -> str:
    """Path of a plan with one table; each shard is (rank, offsets, sizes)."""
    entries = [{"rank": rank, "offsets": offsets, "sizes": sizes} for rank, offsets, sizes in shards]
    tables = {table: {"sharding_type": kind, "shards": entries}}
    path.write_text(json.dumps({"format": 1, "owners": 3, "module": "", "tables": tables}))
    return str(path)


def test_a_file_that_is_no_plan_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    path.write_bytes(b"\x93NUMPY\xff")
    with pytest.raises(ConfigError, match=r"write-torchrec.*not UTF-8$"):
        read_placement(str(path), schema(), 2)
    for offsets, sizes in (([0, 0], [9, 8]), ([0, "a"], [9, 8]), ([0, -4], [9, 8])):
        written_plan(path, "item", "row_wise", (0, [0, 0], [9, 8]), (1, offsets, sizes))
        with pytest.raises(ConfigError, match="write-torchrec"):
            read_placement(str(path), schema(), 2)


def test_pieces_of_columns_that_do_not_divide_a_table_are_refused(tmp_path: Path) -> None:
    """The plan may be of another width. TorchRec would refuse it in each pull, and everyone would be restored
    for ever."""
    shards = [(rank, [0, 4 * rank], [9, 4]) for rank in range(3)]
    placement = read_placement(written_plan(tmp_path / "plan", "item", "column_wise", *shards), schema(), 3)
    with pytest.raises(SchemaError, match=r"'item'.* 3 equal pieces of columns divide, got 8; plan"):
        check_tables(schema(), placement)
    check_tables(schema(), {"item": TablePlacement("column_wise", (0, 1))})


def test_a_plan_for_more_workers_than_a_running_stack_has_is_replaced_by_sharding_by_rows(
    tmp_path: Path, plan_for_three: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = WorkerConfig(
        bootstrap="k:1",
        schema="s.toml",
        store="store",
        controller="c:1",
        shards=("a:1",),
        initial_rows="torchrec",
        initial_placement=plan_for_three,
    )
    store = open_store(str(tmp_path / "store"))
    assert initial_placement(config, schema(), store, SystemClock(), 2) == {}
    assert "spread by rows over 2 workers" in caplog.text and "'item'" in caplog.text
    assert initial_placement(config, schema(), store, SystemClock(), 3)["item"].ranks == (2,)


def test_torchrecs_planner_places_every_table() -> None:
    assert read_placement("planner", schema(), 2).keys() == {t.name for t in schema().tables}


def test_torchrecs_planner_follows_the_counted_traffic() -> None:
    """Round robin would give both busy tables to the same worker. One table has no counts."""
    uniques = {"item": 5000.0, "user": 20.0, "brand": 5000.0, "topic": None}
    tables = [
        PlannedTable(
            name=t.name, dim=t.dim, row_wise_rule=False, uniques=uniques[t.name], ids=uniques[t.name]
        )
        for t in sorted(schema().tables, key=lambda t: list(uniques).index(t.name))
    ]
    placement = read_placement("planner", schema(), 2, tables)
    assert placement["topic"].kind == "row_wise"
    before, after = (
        imbalance(loads(pieces, tables, 2, CostModel())[1])
        for pieces in (round_robin(tables, 2), pieces_of(placement, tables, 2))
    )
    assert before > 1.9 and after < 1.1
