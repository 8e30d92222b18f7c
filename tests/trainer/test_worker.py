"""A worker's commands without a controller, also in unexpected orders and with bad arguments."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError, RoostreamError, SchemaError, UnavailableError
from roostream.models.config import DcnConfig, ModelConfig
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import FakeClock
from roostream.runtime.controller_agent import error_result
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.kafka.topics import Partition, flat
from roostream.runtime.manifest import Manifest, StoredFile, WorkerPart, store_file
from roostream.runtime.rpc import frames
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.warehouse.sessions.session import SessionSpec
from tests.golden.test_golden_commit import golden_store
from tests.runtime.manifest_cases import a_manifest, an_input
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, Built, build
from tests.trainer.memory_store import MemoryStore
from trainer.monitoring.progressive_metrics import summarize
from trainer.monitoring.slices import MAX_SLICES
from trainer.monitoring.windowed_metrics import MAX_VALUES, MetricCells
from trainer.sessions.session_source import PhasedSource, SessionSource, open_session
from trainer.worker import Worker
from trainer.worker_monitor import MAX_TASKS, quality_report


class WorkerHarness:
    """A worker with a fake shard, an in-memory store and in-memory outputs."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        kafka: dict[str, Any] | None = None,
        numbers: Sequence[int] = range(1, 13),
        partitions: tuple[Partition, ...] = PARTITIONS,
        index: int = 0,
    ) -> None:
        self.built: Built = build(samples.records(list(numbers)), partitions=partitions)
        self.built.shard.incarnation = 1
        self.store = store or MemoryStore()
        self.outputs = self.built.outputs
        self.known: dict[int, Schema] = {}
        identity = samples.identity(registry=self.known.get, kafka=kafka or samples.KAFKA)
        self.worker = Worker(self.built.loop, self.outputs, self.store, identity, index)

    def do(self, kind: str, **arguments: Any) -> dict[str, Any]:
        """Execute a command, and return the result as `ControllerAgent` reports it."""
        try:
            return {"ok": True, **self.worker.execute({"id": 1, "kind": kind, "incarnation": 1, **arguments})}
        except RoostreamError as error:
            return error_result(error)

    def started(self, manifest: str = "") -> WorkerHarness:
        assert self.do("restore", manifest=manifest)["ok"]
        assert self.do("start")["ok"]
        return self

    def part(self, *, shared: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train one batch, and do this worker's part of commit 1. Returns its answers to cut and write."""
        self.started().worker.turn()
        cut = self.do("cut", seq=1)
        written = self.do("write", seq=1, shared=shared)
        self.do("resume", seq=1)
        self.do("commit", seq=1)
        return cut, written

    def committed(self) -> Manifest:
        """Do `part`, and store the manifest of a commit made of it alone."""
        manifest = manifest_of(self.part())
        self.put(manifest)
        return manifest

    def put(self, manifest: Manifest) -> None:
        self.store.objects[manifest.name] = manifest.encode()


def manifest_of(*parts: tuple[dict[str, Any], dict[str, Any]]) -> Manifest:
    """The manifest that the controller writes for commit 1. `parts`: answers of workers 0, 1, … to cut and
    write."""
    cut, written = parts[0]
    return a_manifest(
        1,
        schema=f"{samples.schema().fingerprint:016x}",
        num_shards=1,
        kafka=samples.KAFKA,
        shards={},
        dense=StoredFile(**written["dense"]),
        workers={
            index: WorkerPart(
                offsets=flat(cut["offsets"]),
                file=StoredFile(**written["own"]),
                id_files=tuple(StoredFile(**file) for file in written["id_files"]),
                dedupe=written["dedupe"],
                metrics=written["metrics"],
            )
            for index, (cut, written) in enumerate(parts)
        },
        **{k: cut[k] for k in ("watermark_ms", "step", "model", "time_ms")},
    )


def test_a_restore_applies_the_manifest_s_bucket_map() -> None:
    harness = WorkerHarness()
    manifest = dataclasses.replace(
        harness.committed(), bucket_map=BucketMap(BucketMap.modulo(64, 1).owner_B, 1, 4)
    )
    harness.put(manifest)
    restored = WorkerHarness(harness.store)
    assert restored.do("restore", manifest=manifest.name)["ok"]
    assert restored.built.loop.rows.client.owners == manifest.owners and manifest.owners.version == 4


def test_a_worker_trains_only_between_start_and_cut() -> None:
    harness = WorkerHarness()
    assert not harness.worker.turn()
    assert harness.do("restore", manifest="")["ok"] and not harness.worker.turn()
    harness.do("start")
    assert harness.worker.turn()
    cut = harness.do("cut", seq=1)
    assert cut["ok"] and sum(cut["offsets"]["samples"].values()) == 4 and cut["step"] == 1
    assert harness.outputs.num_flushes == 1
    assert not harness.worker.turn(), "training must pause until resume"
    harness.do("resume", seq=1)
    assert harness.worker.turn()
    own = harness.do("write", seq=1, shared=False)
    assert own["ok"] and "dense" not in own and not harness.store.list("dense")
    written = harness.do("write", seq=1, shared=True)
    assert written["dense"]["bytes"] == len(harness.store.get("dense/00000001-1.safetensors"))
    assert written["own"]["bytes"] == len(harness.store.get("workers/00000001-1-0.safetensors"))


def test_a_commit_writes_only_the_ids_trained_since_the_last_one() -> None:
    harness = WorkerHarness(numbers=range(1, 41))
    harness.committed()
    first = harness.store.get("workers/00000001-1-0-ids.safetensors")
    harness.worker.turn()
    assert harness.do("cut", seq=2)["ok"] and harness.do("write", seq=2, shared=True)["ok"]
    assert harness.do("abort", seq=2)["ok"], "the next commit must contain the ids of the aborted one"
    for _ in range(7):
        harness.worker.turn()
    cut, written = harness.do("cut", seq=3), harness.do("write", seq=3, shared=True)
    assert harness.do("resume", seq=3)["ok"] and harness.do("commit", seq=3)["ok"]
    harness.worker.turn()
    last = harness.do("cut", seq=4), harness.do("write", seq=4, shared=True)
    new = tensor_file.decode(harness.store.get("workers/00000004-1-0-ids.safetensors"))[0]
    assert sum(len(ids) for name, ids in new.items() if name.endswith("/id")) == 4
    manifest = dataclasses.replace(manifest_of(last), seq=4)
    names = [file.name for file in manifest.workers[0].id_files]
    assert names == [f"workers/{seq:08d}-1-0-ids.safetensors" for seq in (3, 4)]
    assert (written["dedupe"], manifest.workers[0].dedupe) == (36, 40) and cut["ok"]
    assert harness.store.get("workers/00000001-1-0-ids.safetensors") == first
    harness.put(manifest)
    again = WorkerHarness(harness.store, numbers=[*range(1, 41), *range(1, 41), 50, 51, 52, 53]).started(
        manifest.name
    )
    again.built.train_all()
    assert sorted(p.sample_id for p in again.outputs.predicted) == [50, 51, 52, 53]


def test_a_commit_is_restored_after_the_topics_got_more_partitions() -> None:
    """New partitions change the partition of a key, so a trained sample may be read again from the new
    partition."""
    harness = WorkerHarness()
    manifest = harness.committed()
    trained = sorted(p.sample_id for p in harness.outputs.predicted)
    restored = WorkerHarness(harness.store, partitions=(*PARTITIONS, ("samples", 2)))
    restored.worker.identity = dataclasses.replace(
        restored.worker.identity, num_partitions=manifest.num_partitions + 1
    )
    restored.started(manifest.name)
    assert restored.worker.loop.partitions.progress == {**manifest.offsets, ("samples", 2): 0}
    moved = [
        record._replace(partition=2, offset=offset) for offset, record in enumerate(samples.records(trained))
    ]
    batch = restored.worker.loop.source.decoder.decode(moved)[0]  # type: ignore[attr-defined]
    assert len(trained) == 4 and not restored.worker.loop.partitions.claim(batch).any()


def test_a_commit_has_the_leader_epochs_of_the_records_before_its_offsets() -> None:
    harness = WorkerHarness().started()
    chunk = harness.worker.loop.source.poll(4, 0.0)
    assert chunk is not None
    epochs = {partition: 7 for partition in chunk.after}
    loop = harness.worker.loop
    claimed = loop.claim(dataclasses.replace(chunk, leader_epochs=epochs))
    loop.train(loop.pull(claimed))
    at = loop.snapshot()
    assert {p: part.leader_epoch for p, part in at.partitions.items() if part.offset} == epochs
    loop.partitions.progress |= {p: offset + 1 for p, offset in chunk.after.items()}
    later = loop.snapshot()
    assert all(part.leader_epoch == -1 for part in later.partitions.values()), (
        "the epoch of the record before this offset is unknown"
    )


def test_a_commit_of_format_1_can_be_restored() -> None:
    store = golden_store()
    harness = WorkerHarness(store, numbers=[*range(1, 13), 2, 3, 20, 21])
    at = manifests.load(store, "manifests/00000001").manifest
    harness.started(at.name)
    assert harness.worker.loop.partitions.progress == at.offsets and harness.worker.loop.num_steps == at.step
    measured = summarize(harness.worker.loop.report())
    assert measured["requests"] == 8
    assert measured["tasks"]["click"] == pytest.approx(at.workers[0].metrics["tasks"]["click"])
    kept, _ = tensor_file.decode(manifests.read_file(store, at.dense))
    shared = harness.worker.loop.snapshot().shared
    assert shared.pop("watermark.recent_ms").tolist() == [at.watermark_ms], "format 1 has only the watermark"
    assert shared.pop("inputs.names").size and shared.pop("inputs.columns").size, (
        "format 1 does not name inputs"
    )
    # Format 1 has no weight averages. They start at the weights.
    weights = {name: name.replace("trained.", "model.") for name in shared}
    # Models of format 1 do not have these parts.
    added = {name for name in shared if ".linear." in name or ".scale_rates." in name}
    assert added and not any(shared[name].any() for name in added)
    assert all(shared[name].tobytes() == kept[weights[name]].tobytes() for name in shared.keys() - added)
    harness.built.train_all()
    assert sorted(p.sample_id for p in harness.outputs.predicted) == [9, 10, 11, 12, 20, 21], (
        "2 and 3 were trained before the commit"
    )
    assert harness.worker.loop.report()["requests"] == 14


def test_offsets_are_reported_only_after_predictions_are_acknowledged() -> None:
    harness = WorkerHarness().started()
    harness.worker.turn()
    harness.outputs.flush_error = "Kafka has not acknowledged 4 predictions"
    refused = harness.do("cut", seq=1)
    assert not refused["ok"] and refused["away"] and refused["error"] == harness.outputs.flush_error
    assert harness.worker.turn(), "training must continue"


def test_a_refused_prediction_stops_training_until_it_is_sent_again() -> None:
    harness = WorkerHarness().started()
    harness.worker.turn()
    harness.outputs.refusal = "Kafka refused a record"
    assert not harness.worker.turn() and harness.worker.report()["broken"] == "Kafka refused a record"
    assert not harness.do("cut", seq=1)["ok"], "its offsets must never be committed"
    harness.outputs.refusal = ""
    assert not harness.worker.turn(), "only a restore sends the prediction again"
    harness.outputs.refusal = "Kafka refused a record"
    harness.started()
    assert harness.worker.turn() and not harness.worker.report()["broken"]
    assert [p.sample_id for p in harness.outputs.predicted[:4]] == [
        p.sample_id for p in harness.outputs.predicted[4:]
    ]


def test_a_refusal_found_by_a_cut_breaks_the_worker() -> None:
    harness = WorkerHarness().started()
    harness.worker.turn()
    harness.outputs.flush = lambda: refuse(harness)  # type: ignore[method-assign]
    assert not harness.do("cut", seq=1)["ok"]
    assert harness.worker.report()["broken"] == "found by the flush" and not harness.worker.turn()


def refuse(harness: WorkerHarness) -> None:
    harness.outputs.refusal = "found by the flush"
    raise UnavailableError(harness.outputs.refusal)


def test_a_restore_reaches_a_worker_that_waits_for_queue_space() -> None:
    harness = WorkerHarness().started()
    harness.outputs.full = True
    trainer = threading.Thread(target=harness.worker.turn)
    trainer.start()
    assert harness.outputs.is_waiting.wait(10)
    restore = {"id": 9, "kind": "restore", "incarnation": 2, "manifest": ""}
    submitting = threading.Thread(target=harness.worker.submit, args=(restore,))
    submitting.start()
    trainer.join(10)
    assert harness.worker.report()["broken"].startswith("the queue is full")
    harness.outputs.full = False
    while submitting.is_alive():
        harness.worker.serve_inbox()
        submitting.join(0.01)
    assert harness.worker.incarnation == 2 and not harness.worker.broken


def test_an_abort_ends_older_cuts_and_refuses_later_ones() -> None:
    harness = WorkerHarness().started()
    harness.do("cut", seq=3)
    assert not harness.worker.turn()
    harness.do("abort", seq=5)
    assert harness.worker.turn(), "the abort must end the cut"
    refused = harness.do("cut", seq=5)
    assert "aborted" in refused["error"] and harness.worker.turn()
    assert harness.do("cut", seq=6)["ok"]
    assert not harness.do("resume", seq=5)["ok"] and not harness.worker.turn(), (
        "this resume belongs to another cut"
    )
    harness.started()
    assert harness.do("cut", seq=1)["ok"]


def test_a_broken_worker_does_not_resume_on_command() -> None:
    harness = WorkerHarness().started()
    harness.worker.turn()
    assert harness.do("cut", seq=1)["ok"]
    harness.worker.broken = "a shard is away"
    harness.do("resume", seq=1)
    assert not harness.worker.turn() and harness.worker.loop.num_steps == 1


def test_a_worker_without_its_shard_reports_it_and_waits_for_a_restore() -> None:
    harness = WorkerHarness().started()
    harness.built.transport.down = True
    assert not harness.worker.turn()
    assert "injected fault" in harness.worker.report()["broken"]
    assert not harness.do("cut", seq=1)["ok"]
    harness.built.transport.down = False
    assert not harness.worker.turn()
    harness.started()
    assert harness.worker.turn() and not harness.worker.report()["broken"]


def test_the_pause_of_a_commit_is_counted_as_commit_time() -> None:
    harness = WorkerHarness().started()
    for seq, kind in ((1, "resume"), (2, "abort")):
        assert harness.do("cut", seq=seq)["ok"]
        harness.built.clock.advance(2)
        assert harness.do(kind, seq=seq)["ok"]
        assert harness.do("commit" if kind == "resume" else "start", seq=seq)["ok"]
        harness.built.clock.advance(100)
    assert harness.worker.loop.stages.of_loop("commit") == 4


def test_shard_addresses_in_a_wrong_order_put_training_on_hold_after_some_tries() -> None:
    worker = WorkerHarness().worker

    def refuse_order() -> None:
        raise ConfigError("shards: expected the address of shard 0 at place 0")

    worker.check_shards = refuse_order
    for error in (UnavailableError, UnavailableError, ConfigError):
        with pytest.raises(error, match="at place 0"):
            worker.execute({"kind": "start", "incarnation": 1})
        assert not worker.training and (worker.refusal is not None) == (error is ConfigError)


@pytest.mark.parametrize(("workers", "num_slices"), [(1, MAX_SLICES), (MAX_WORKERS, 1)])
def test_the_largest_reports_fit_into_a_call(workers: int, num_slices: int) -> None:
    """A beat has the report of one of several workers, and the controller's status has those of all. A worker
    whose beats could not be sent would be lost, after each restart."""
    cell = MetricCells([f"task {n}" for n in range(MAX_TASKS)]).report([])
    by_value = {f"value {n}": {"1h": cell, "all": cell} for n in range(MAX_VALUES + 1)}
    slices = {f"slice {n}": by_value for n in range(num_slices)}
    windows = {"1h": cell, "1d": cell, "all": cell}
    quality = quality_report({"windows": windows, "slices": slices}, None, with_scores=True)
    reports = {f"worker {n}": {"watch": quality} for n in range(workers)}
    assert frames.encode(frames.ANSWER, {"header": {"reports": reports}})


def test_counts_since_the_start_do_not_fall_at_a_restore() -> None:
    harness = WorkerHarness(numbers=(1, 2, 1, 2)).started()
    harness.worker.turn()
    before = harness.worker.report()
    assert (before["requests"], before["duplicates"]) == (2, 2)
    assert harness.do("restore", manifest="")["ok"]
    after = harness.worker.report()
    assert all(after[name] == before[name] for name in ("requests", "duplicates", "outcomes"))


def test_a_long_load_or_save_of_rows_shows_in_the_report() -> None:
    """The controller gives a cut more time, and the program stays alive."""
    harness, calls = WorkerHarness(), list[str]()
    harness.worker.on_progress = lambda: calls.append("alive")
    before = harness.worker.report()["progress"]
    harness.worker.note_progress()
    assert harness.worker.report()["progress"] != before and calls == ["alive"]


def test_a_command_that_fails_with_a_timeout_is_answered() -> None:
    """The agent's thread took it for its own wait, and waited for ever: no later command was executed."""
    worker, failed, errors = WorkerHarness().started().worker, threading.Event(), list[Exception]()

    def fail() -> None:
        failed.set()
        raise TimeoutError("a call of the operating system took too long")

    def submit() -> None:
        try:
            worker.submit({"id": 2, "kind": "start", "incarnation": 1})
        except Exception as error:
            errors.append(error)

    worker.check_shards = fail
    agent = threading.Thread(target=submit)
    agent.start()
    while not failed.is_set():
        worker.serve_inbox()
    agent.join(60)
    worker.close()
    agent.join()
    assert [type(error) for error in errors] == [TimeoutError]


def test_an_unknown_command_is_refused() -> None:
    assert "expected one of restore, start" in WorkerHarness().do("dance")["error"]


@pytest.mark.parametrize("part", ["shared", "own", "ids"])
def test_g5_damaged_files_are_reported_as_damaged(part: str) -> None:
    harness = WorkerHarness()
    manifest = harness.committed()
    own = manifest.workers[0]
    name = {"shared": manifest.dense, "own": own.file, "ids": own.id_files[0]}[part].name
    harness.store.damage(name)
    result = harness.do("restore", manifest=manifest.name)
    assert result["damaged"] and "it is damaged" in result["error"]
    assert not harness.worker.turn()
    harness.store.delete(name)
    assert harness.do("restore", manifest=manifest.name)["damaged"]


def test_an_intact_commit_of_another_version_is_refused_for_good_and_not_as_damaged() -> None:
    harness = WorkerHarness()
    manifest = harness.committed()
    tensors, _ = tensor_file.decode(harness.store.get(manifest.dense.name))
    name = "model.deep.layers.0.weight"  # not of a part that commits of older versions lack
    other = tensor_file.encode({n: value for n, value in tensors.items() if n != name}, {})
    harness.put(dataclasses.replace(manifest, dense=store_file(harness.store, manifest.dense.name, other)))
    result = harness.do("restore", manifest=manifest.name)
    assert not result["ok"] and result["permanent"] and not result["damaged"]
    assert f"expected {name} of shape" in result["error"]


def test_no_commit_is_skipped_because_its_warehouse_is_away(tmp_path: Path) -> None:
    """The mount point of a warehouse that is not mounted is empty. An older commit needs the same session."""
    harness = WorkerHarness()
    session = an_input(
        table=str(tmp_path), spec=SessionSpec(table=str(tmp_path), version=7, shuffle_seed=None).plain()
    )
    committed = dataclasses.replace(harness.committed(), input=session)
    harness.put(committed)

    def opened(table: TableInput) -> SessionSource:
        return open_session(table, samples.schema(), PARTITIONS, 1, FakeClock())

    harness.built.loop.source = PhasedSource(harness.built.loop.source, opened)
    fields = {"partitions": [0, 1], "input": session.plain()}
    result = harness.do("restore", manifest=committed.name, **fields)
    assert result["away"] and not result["damaged"] and str(tmp_path) in result["error"]


def changed_schema(**feature: Any) -> Schema:
    user, hour = samples.TABLES["ro"]
    return schema_from_dict({**samples.TABLES, "ro": [user, {**hour, **feature}]})


def test_an_incompatible_schema_is_refused() -> None:
    harness = WorkerHarness()
    old = changed_schema(kind="ids", table="item")
    harness.known[old.fingerprint] = old
    harness.put(dataclasses.replace(harness.committed(), schema=f"{old.fingerprint:016x}"))
    result = harness.do("restore", manifest="manifests/00000001")
    assert not result["ok"] and not result["damaged"]
    with pytest.raises(SchemaError, match=r"feature 'hour': expected kind 'float' .*, got 'ids'"):
        harness.worker.turn()
    assert isinstance(harness.worker.refusal, SchemaError), "the program uses it to put training on hold"


def test_offsets_of_another_kafka_are_refused() -> None:
    harness = WorkerHarness()
    harness.committed()
    other = WorkerHarness(harness.store, kafka={"cluster_id": "d", "topics": {"samples": "2"}})
    result = other.do("restore", manifest="manifests/00000001")
    assert not result["damaged"], "an older manifest would have the same problem"
    with pytest.raises(
        ConfigError, match=r"expected Kafka cluster c with .* got d with .* `roostream reset`"
    ):
        other.worker.turn()


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        (dataclasses.replace(samples.MODEL, cross_layers=2), "cross_layers = 1, got cross_layers = 2; "),
        (DcnConfig(), "kind = ranker, got kind = dcn; "),  # whose other settings do not compare
    ],
)
def test_another_model_is_refused_with_the_difference(model: ModelConfig, difference: str) -> None:
    harness = WorkerHarness()
    harness.committed()
    harness.built.loop.model_config = model
    error = harness.do("restore", manifest="manifests/00000001")["error"]
    assert f"expected the model's {difference}" in error


def test_a_manifest_without_a_model_kind_is_restored() -> None:
    harness = WorkerHarness()
    before = harness.committed()
    harness.put(dataclasses.replace(before, model={k: v for k, v in before.model.items() if k != "kind"}))
    assert "error" not in harness.do("restore", manifest=before.name)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: 9 bytes"
        ),
    ],
)
def test_out_of_memory_is_a_permanent_failure(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = WorkerHarness().started()

    def step() -> bool:
        raise error

    monkeypatch.setattr(harness.built.loop, "step", step)
    assert harness.worker.turn() is False and not harness.worker.training
    assert (
        harness.worker.report()["fatal"].startswith("out of memory: ") and harness.worker.report()["broken"]
    )


def test_a_worker_with_another_schema_than_the_controller_waits() -> None:
    """This happens while programs are restarted with a new schema file. All parts of a commit must have been
    written with the schema that it names."""
    harness = WorkerHarness()
    result = harness.do("restore", manifest="", schema="00000000000000aa")
    assert result["away"] and "expected the controller's schema 00000000000000aa" in result["error"]
    assert not harness.worker.turn() and harness.worker.broken
    assert harness.do("restore", manifest="", schema=f"{harness.worker.loop.schema.fingerprint:016x}")["ok"]
