"""A table that has become wider, or has another update rule, since its rows were committed keeps what was
learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from param_server.embedding_table import Keys
from param_server.initial_rows import initial_rows
from param_server.key_value_store import MemoryKeyValueStore
from param_server.server import Shard, ShardRpcHandler
from roostream.errors import CheckpointError, SchemaError
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.update_rules import RULES
from tests.param_server.shard_support import commit, make_shard, state_of
from tests.trainer.memory_store import MemoryStore

SEED, IDS = 0, np.arange(40, dtype=np.int64)


def schema(dim: int = 4, rule: str = "adagrad", **other_tables: Any) -> Schema:
    """`user` shares a stack with `item` while that is d4-adagrad."""
    tables = {
        "item": {"dim": dim, "rule": {"name": rule}, "init_scale": 0.5},
        "user": {"dim": 4},
        **other_tables,
    }
    return schema_from_dict(
        {
            "tables": {name: t for name, t in tables.items() if t},
            "label": [{"name": "click", "action": "click"}],
        }
    )


class ShardHome:
    """What outlives a shard's processes: its home, the store and the numbers of commits."""

    def __init__(self) -> None:
        self.blobs, self.store, self.incarnation, self.seq, self.last = (
            MemoryKeyValueStore(),
            MemoryStore(),
            0,
            0,
            "",
        )

    def start(self, schema_: Schema) -> Shard:
        shard = make_shard(self.blobs, self.store, schema=schema_, seed=SEED, publishing=False)
        self.restore(shard)
        return shard

    def restore(self, shard: Shard) -> None:
        self.incarnation += 1
        shard.restore(self.incarnation, self.last)

    def commit(self, shard: Shard) -> None:
        self.seq += 1
        self.last = commit(shard, self.store, self.seq)


def push(shard: Shard, table: str, ids: np.ndarray = IDS) -> None:
    table_ = shard.identity.schema.table_by_name[table]
    sequence = shard.sequences.get(0, 0) + 1
    header = {
        "incarnation": shard.incarnation,
        "worker": 0,
        "sequence": sequence,
        "step": sequence,
        "time_ms": 1000,
    }
    header |= {"oldest_engagement_ms": 0, "oldest_close_ms": 0, "stacks": [table_.stack]}
    gradient_UD = (
        np.random.default_rng([sequence, table_.id]).normal(size=(len(ids), table_.dim)).astype(np.float32)
    )
    ShardRpcHandler(shard).handle("push", header, [np.full(len(ids), table_.id, np.uint32), ids, gradient_UD])


def rows_and_state(shard: Shard, table: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows [N, D] and their state [N, A], in the order of IDS."""
    table_ = shard.identity.schema.table_by_name[table]
    rows = shard.tables[table_.stack]
    position_N = rows.index.find(Keys(np.full(len(IDS), table_.id, np.uint32), IDS))
    assert (position_N >= 0).all()
    return rows.embeddings.rows_ND[position_N].copy(), rows.state_NA[position_N].copy()


def trained_home(rule: str = "adagrad", **other_tables: Any) -> tuple[ShardHome, Shard]:
    """A home with two commits of a table of width 4."""
    home = ShardHome()
    shard = home.start(schema(4, rule, **other_tables))
    for _ in range(2):
        push(shard, "item")
        push(shard, "user")
        home.commit(shard)
    return home, shard


def initial_of(schema_: Schema) -> np.ndarray:
    table = schema_.table_by_name["item"]
    return initial_rows(SEED, np.full(len(IDS), table.id, np.uint32), IDS, table.dim, table.init_scale)


@pytest.mark.parametrize("rule", RULES)
def test_old_columns_stay_and_new_ones_start_at_initial_values(rule: str) -> None:
    home, before = trained_home(rule)
    (rows_N4, _), users = rows_and_state(before, "item"), rows_and_state(before, "user")
    shard = home.start(schema(6, rule))
    rows_N6, _ = rows_and_state(shard, "item")
    assert np.array_equal(rows_N6[:, :4], rows_N4)
    assert np.array_equal(rows_N6[:, 4:], initial_of(schema(6, rule))[:, 4:])
    assert all(
        np.array_equal(now, then) for now, then in zip(rows_and_state(shard, "user"), users, strict=True)
    )
    push(shard, "item")
    assert np.isfinite(rows_and_state(shard, "item")[0]).all() and not np.array_equal(
        rows_and_state(shard, "item")[0], rows_N6
    )


def test_optimizer_state_is_kept_and_extended_for_new_columns() -> None:
    home, before = trained_home("adagrad")
    _, state_N6 = rows_and_state(home.start(schema(6)), "item")
    assert (
        np.array_equal(state_N6[:, :4], rows_and_state(before, "item")[1])
        and (state_N6[:, 4:] == np.float32(1e-5)).all()
    )
    home, before = trained_home("rowwise_adagrad")
    assert np.array_equal(
        rows_and_state(home.start(schema(6, "rowwise_adagrad")), "item")[1], rows_and_state(before, "item")[1]
    )
    home, before = trained_home("adam")
    (_, then_N9), (_, now_N13) = (
        rows_and_state(before, "item"),
        rows_and_state(home.start(schema(6, "adam")), "item"),
    )
    m_v_t = [then_N9[:, :4], np.zeros((40, 2)), then_N9[:, 4:8], np.zeros((40, 2)), then_N9[:, 8:]]
    assert np.array_equal(now_N13, np.concatenate(m_v_t, axis=1)) and (now_N13[:, 12] == 2).all()


@pytest.mark.parametrize(
    ("then", "now"), [("adagrad", "adam"), ("adam", "rowwise_adagrad"), ("rowwise_adagrad", "adagrad")]
)
@pytest.mark.parametrize("dim", [5])
def test_another_rule_starts_from_the_learned_rows(then: str, now: str, dim: int) -> None:
    home, before = trained_home(then)
    shard = home.start(schema(dim, now))
    rows_ND, state_NA = rows_and_state(shard, "item")
    assert np.array_equal(rows_ND[:, :4], rows_and_state(before, "item")[0])
    assert (state_NA == np.float32(shard.identity.schema.table_by_name["item"].rule.first_state)).all()


def test_the_first_commit_writes_everything_and_later_ones_changes() -> None:
    home, _ = trained_home()
    shard = home.start(schema(6))
    assert shard.segments.needs_rewrite
    push(shard, "user", IDS[:1])
    bits = state_of(shard)
    home.commit(shard)
    (first,) = shard.committed.segments
    assert first.rows == 80 and not shard.segments.needs_rewrite
    assert state_of(home.start(schema(6))) == bits
    push(shard, "user", IDS[:1])
    home.commit(shard)
    assert [segment.rows for segment in shard.committed.segments] == [80, 1]


def test_a_rollback_and_an_abandoned_commit_before_the_first_one_lose_nothing() -> None:
    home, _ = trained_home()
    shard = home.start(schema(6))
    bits = state_of(shard)
    push(shard, "item")
    shard.freeze(3, 0)
    shard.write(3)
    shard.abort(3)
    home.restore(shard)
    assert state_of(shard) == bits
    push(shard, "item", IDS[:1])
    after = state_of(shard)
    home.seq += 1
    home.commit(shard)
    assert state_of(home.start(schema(6))) == after
    push(shard, "item")
    home.restore(shard)
    assert state_of(shard) == after, "a running shard must roll back to the first commit of the wide rows"


def test_a_rollback_to_before_the_change_restores_the_old_rows() -> None:
    home, _ = trained_home()
    last = home.last
    shard = home.start(schema(6))
    bits = state_of(shard)
    push(shard, "item")
    home.commit(shard)
    home.last = last
    home.restore(shard)
    assert state_of(shard) == bits and shard.segments.needs_rewrite


def test_a_widened_table_leaves_its_stack_and_a_removed_one_is_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    home, before = trained_home()
    assert {name for name, *_ in state_of(before)} == {"d4-adagrad"}
    shard = home.start(schema(6))
    table = {t.name: t.id for t in schema(6).tables}
    assert {(stack, t) for stack, t, _ in state_of(shard)} == {
        ("d6-adagrad", table["item"]),
        ("d4-adagrad", table["user"]),
    }
    assert "left out" not in caplog.text, "the rows were moved to another stack, not dropped"
    shard = home.start(schema(4, user=None))
    assert {t for _, t, _ in state_of(shard)} == {table["item"]}
    assert "d4-adagrad are dropped" in caplog.text


def test_a_narrower_table_is_refused_in_one_sentence_and_changes_nothing() -> None:
    home, before = trained_home()
    shard = make_shard(home.blobs, home.store, schema=schema(3), seed=SEED)
    with pytest.raises(
        SchemaError,
        match=r"^table 'item': expected dim 4 or more, as committed, got 3; give the narrower table",
    ):
        home.restore(shard)
    assert not shard.ready
    assert state_of(home.start(schema())) == state_of(before)


def test_a_damaged_part_of_the_former_stack_is_named() -> None:
    home, _ = trained_home("adam")
    key = next(k for k in home.blobs.data if b"/d4-adam/" in k)
    home.blobs.data[key] = home.blobs.data[key][:-1] + b"x"
    with pytest.raises(CheckpointError):
        home.start(schema(6, "adam"))
