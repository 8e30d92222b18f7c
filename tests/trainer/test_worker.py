"""The worker's commands, alone; what happens when the controller is not polite."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from roostream.errors import ConfigError, RoostreamError, SchemaError, UnavailableError
from roostream.models.config import DcnConfig, ModelConfig
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.controller_agent import error_result
from roostream.runtime.kafka.topics import Partition, flat
from roostream.runtime.manifest import Manifest, StoredFile, WorkerPart
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from tests.golden.test_golden_commit import golden_store
from tests.runtime.manifest_cases import a_manifest
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS, Built, build
from tests.trainer.memory_store import MemoryStore
from trainer.monitoring.progressive_metrics import summarize
from trainer.worker import Worker


class Stage:
    """A worker that was restored to the beginning and started, its store, and what it told."""

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
        """The result as `roostream.runtime.controller_agent.ControllerAgent` tells it."""
        try:
            return {"ok": True, **self.worker.execute({"id": 1, "kind": kind, "incarnation": 1, **arguments})}
        except RoostreamError as error:
            return error_result(error)

    def started(self, manifest: str = "") -> Stage:
        assert self.do("restore", manifest=manifest)["ok"]
        assert self.do("start")["ok"]
        return self

    def part(self, *, shared: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """Train one batch and do this worker's share of commit 1; what it answered to cut and to write."""
        self.started().worker.turn()
        cut = self.do("cut", seq=1)
        written = self.do("write", seq=1, shared=shared)
        self.do("resume", seq=1)
        self.do("commit", seq=1)
        return cut, written

    def committed(self) -> Manifest:
        """`part` as a whole commit."""
        manifest = manifest_of(self.part())
        self.put(manifest)
        return manifest

    def put(self, manifest: Manifest) -> None:
        self.store.objects[manifest.name] = manifest.encode()


def manifest_of(*parts: tuple[dict[str, Any], dict[str, Any]]) -> Manifest:
    """Commit 1 as the controller makes it of workers 0, 1, …"""
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
    stage = Stage()
    manifest = dataclasses.replace(
        stage.committed(), bucket_map=BucketMap(BucketMap.modulo(64, 1).owner_B, 1, 4)
    )
    stage.put(manifest)
    again = Stage(stage.store)
    assert again.do("restore", manifest=manifest.name)["ok"]
    assert again.built.loop.rows.client.owners == manifest.owners and manifest.owners.version == 4


def test_a_worker_trains_only_between_start_and_cut() -> None:
    stage = Stage()
    assert not stage.worker.turn()
    assert stage.do("restore", manifest="")["ok"] and not stage.worker.turn()
    stage.do("start")
    assert stage.worker.turn()
    cut = stage.do("cut", seq=1)
    assert cut["ok"] and sum(cut["offsets"]["samples"].values()) == 4 and cut["step"] == 1
    assert stage.outputs.num_flushes == 1
    assert not stage.worker.turn(), "paused until resume"
    stage.do("resume", seq=1)
    assert stage.worker.turn()
    own = stage.do("write", seq=1, shared=False)
    assert own["ok"] and "dense" not in own and not stage.store.list("dense")
    written = stage.do("write", seq=1, shared=True)
    assert written["dense"]["bytes"] == len(stage.store.get("dense/00000001-1.safetensors"))
    assert written["own"]["bytes"] == len(stage.store.get("workers/00000001-1-0.safetensors"))


def test_a_commit_writes_only_the_ids_trained_since_the_last_one() -> None:
    stage = Stage(numbers=range(1, 41))
    stage.committed()
    first = stage.store.get("workers/00000001-1-0-ids.safetensors")
    stage.worker.turn()
    assert stage.do("cut", seq=2)["ok"] and stage.do("write", seq=2, shared=True)["ok"]
    assert stage.do("abort", seq=2)["ok"], "so the next commit has its ids too"
    for _ in range(7):
        stage.worker.turn()
    cut, written = stage.do("cut", seq=3), stage.do("write", seq=3, shared=True)
    assert stage.do("resume", seq=3)["ok"] and stage.do("commit", seq=3)["ok"]
    stage.worker.turn()
    last = stage.do("cut", seq=4), stage.do("write", seq=4, shared=True)
    new = tensor_file.decode(stage.store.get("workers/00000004-1-0-ids.safetensors"))[0]
    assert sum(len(ids) for name, ids in new.items() if name.endswith("/id")) == 4
    manifest = dataclasses.replace(manifest_of(last), seq=4)
    names = [file.name for file in manifest.workers[0].id_files]
    assert names == [f"workers/{seq:08d}-1-0-ids.safetensors" for seq in (3, 4)]
    assert (written["dedupe"], manifest.workers[0].dedupe) == (36, 40) and cut["ok"]
    assert stage.store.get("workers/00000001-1-0-ids.safetensors") == first
    stage.put(manifest)
    again = Stage(stage.store, numbers=[*range(1, 41), *range(1, 41), 50, 51, 52, 53]).started(manifest.name)
    again.built.train_all()
    assert sorted(p.sample_id for p in again.outputs.predicted) == [50, 51, 52, 53]


def test_a_commit_is_restored_after_the_topics_got_more_partitions() -> None:
    """Keys are spread anew: a sample that was trained comes again in the new partition."""
    stage = Stage()
    manifest = stage.committed()
    trained = sorted(p.sample_id for p in stage.outputs.predicted)
    again = Stage(stage.store, partitions=(*PARTITIONS, ("samples", 2)))
    again.worker.identity = dataclasses.replace(
        again.worker.identity, num_partitions=manifest.num_partitions + 1
    )
    again.started(manifest.name)
    assert again.worker.loop.partitions.progress == {**manifest.offsets, ("samples", 2): 0}
    moved = [
        record._replace(partition=2, offset=offset) for offset, record in enumerate(samples.records(trained))
    ]
    batch = again.worker.loop.source.decoder.decode(moved)[0]  # type: ignore[attr-defined]
    assert len(trained) == 4 and not again.worker.loop.partitions.claim(batch).any()


def test_a_commit_has_the_leader_epochs_of_the_records_before_its_offsets() -> None:
    stage = Stage().started()
    chunk = stage.worker.loop.source.poll(4, 0.0)
    assert chunk is not None
    epochs = {partition: 7 for partition in chunk.after}
    loop = stage.worker.loop
    claimed = loop.claim(dataclasses.replace(chunk, leader_epochs=epochs))
    loop.train(loop.pull(claimed))
    at = loop.snapshot()
    assert {p: part.leader_epoch for p, part in at.partitions.items() if part.offset} == epochs
    loop.partitions.progress |= {p: offset + 1 for p, offset in chunk.after.items()}
    later = loop.snapshot()
    assert all(part.leader_epoch == -1 for part in later.partitions.values()), "not of the record before"


def test_a_commit_of_format_1_can_be_restored() -> None:
    store = golden_store()
    stage = Stage(store, numbers=[*range(1, 13), 2, 3, 20, 21])
    at = manifests.load(store, "manifests/00000001").manifest
    stage.started(at.name)
    assert stage.worker.loop.partitions.progress == at.offsets and stage.worker.loop.num_steps == at.step
    measured = summarize(stage.worker.loop.report())
    assert measured["requests"] == 8
    assert measured["tasks"]["click"] == pytest.approx(at.workers[0].metrics["tasks"]["click"])
    kept, _ = tensor_file.decode(manifests.read_file(store, at.dense))
    shared = stage.worker.loop.snapshot().shared
    assert shared.pop("watermark.recent_ms").tolist() == [at.watermark_ms], "what it had to say of times"
    assert shared.pop("inputs.names").size and shared.pop("inputs.columns").size, "which it did not name"
    weights = {
        name: name.replace("trained.", "model.") for name in shared
    }  # it had no average: that begins at them
    # Parts that models of then did not have.
    added = {name for name in shared if ".linear." in name or ".scale_rates." in name}
    assert added and not any(shared[name].any() for name in added)
    assert all(shared[name].tobytes() == kept[weights[name]].tobytes() for name in shared.keys() - added)
    stage.built.train_all()
    assert sorted(p.sample_id for p in stage.outputs.predicted) == [9, 10, 11, 12, 20, 21], (
        "2 and 3 were trained before"
    )
    assert stage.worker.loop.report()["requests"] == 14


def test_offsets_are_reported_only_after_predictions_are_acknowledged() -> None:
    stage = Stage().started()
    stage.worker.turn()
    stage.outputs.unflushable = "Kafka has not acknowledged 4 predictions"
    refused = stage.do("cut", seq=1)
    assert not refused["ok"] and refused["away"] and refused["error"] == stage.outputs.unflushable
    assert stage.worker.turn(), "training goes on"


def test_a_refused_prediction_stops_training_until_it_is_sent_again() -> None:
    stage = Stage().started()
    stage.worker.turn()
    stage.outputs.refusal = "Kafka refused a record"
    assert not stage.worker.turn() and stage.worker.report()["broken"] == "Kafka refused a record"
    assert not stage.do("cut", seq=1)["ok"], "its offsets are never committed"
    stage.outputs.refusal = ""
    assert not stage.worker.turn(), "only a restore sends it again"
    stage.outputs.refusal = "Kafka refused a record"
    stage.started()
    assert stage.worker.turn() and not stage.worker.report()["broken"]
    assert [p.sample_id for p in stage.outputs.predicted[:4]] == [
        p.sample_id for p in stage.outputs.predicted[4:]
    ]


def test_a_refusal_found_by_a_cut_breaks_the_worker() -> None:
    stage = Stage().started()
    stage.worker.turn()
    stage.outputs.flush = lambda: refuse(stage)  # type: ignore[method-assign]
    assert not stage.do("cut", seq=1)["ok"]
    assert stage.worker.report()["broken"] == "found by the flush" and not stage.worker.turn()


def refuse(stage: Stage) -> None:
    stage.outputs.refusal = "found by the flush"
    raise UnavailableError(stage.outputs.refusal)


def test_a_restore_reaches_a_worker_that_waits_for_queue_space() -> None:
    stage = Stage().started()
    stage.outputs.full = True
    trainer = threading.Thread(target=stage.worker.turn)
    trainer.start()
    assert stage.outputs.waits.wait(10)
    restore = {"id": 9, "kind": "restore", "incarnation": 2, "manifest": ""}
    told = threading.Thread(target=stage.worker.submit, args=(restore,))
    told.start()
    trainer.join(10)
    assert stage.worker.report()["broken"].startswith("the queue is full")
    stage.outputs.full = False
    while told.is_alive():
        stage.worker.serve_inbox()
        told.join(0.01)
    assert stage.worker.incarnation == 2 and not stage.worker.broken


def test_an_abort_ends_older_cuts_and_refuses_later_ones() -> None:
    stage = Stage().started()
    stage.do("cut", seq=3)
    assert not stage.worker.turn()
    stage.do("abort", seq=5)
    assert stage.worker.turn(), "the cut is over"
    refused = stage.do("cut", seq=5)
    assert "aborted" in refused["error"] and stage.worker.turn()
    assert stage.do("cut", seq=6)["ok"]
    assert not stage.do("resume", seq=5)["ok"] and not stage.worker.turn(), "of another cut"
    stage.started()
    assert stage.do("cut", seq=1)["ok"]


def test_a_broken_worker_does_not_resume_on_command() -> None:
    stage = Stage().started()
    stage.worker.turn()
    assert stage.do("cut", seq=1)["ok"]
    stage.worker.broken = "a shard is away"
    stage.do("resume", seq=1)
    assert not stage.worker.turn() and stage.worker.loop.num_steps == 1


def test_a_worker_without_its_shard_reports_it_and_waits_for_a_restore() -> None:
    stage = Stage().started()
    stage.built.transport.down = True
    assert not stage.worker.turn()
    assert "injected fault" in stage.worker.report()["broken"]
    assert not stage.do("cut", seq=1)["ok"]
    stage.built.transport.down = False
    assert not stage.worker.turn()
    stage.started()
    assert stage.worker.turn() and not stage.worker.report()["broken"]


def test_the_pause_of_a_commit_is_counted_as_commit_time() -> None:
    stage = Stage().started()
    for seq, kind in ((1, "resume"), (2, "abort")):
        assert stage.do("cut", seq=seq)["ok"]
        stage.built.clock.advance(2)
        assert stage.do(kind, seq=seq)["ok"]
        assert stage.do("commit" if kind == "resume" else "start", seq=seq)["ok"]
        stage.built.clock.advance(100)
    assert stage.worker.loop.stages.of_loop("commit") == 4


def test_shards_that_are_named_in_a_wrong_order_put_training_on_hold_after_some_tries() -> None:
    worker = Stage().worker

    def refuse_order() -> None:
        raise ConfigError("shards: expected the address of shard 0 at place 0")

    worker.check_shards = refuse_order
    for error in (UnavailableError, UnavailableError, ConfigError):
        with pytest.raises(error, match="at place 0"):
            worker.execute({"kind": "start", "incarnation": 1})
        assert not worker.training and (worker.refusal is not None) == (error is ConfigError)


def test_an_unknown_command_is_refused() -> None:
    assert "expected one of restore, start" in Stage().do("dance")["error"]


@pytest.mark.parametrize("part", ["shared", "own", "ids"])
def test_g5_damaged_files_are_reported_as_damaged(part: str) -> None:
    stage = Stage()
    manifest = stage.committed()
    own = manifest.workers[0]
    name = {"shared": manifest.dense, "own": own.file, "ids": own.id_files[0]}[part].name
    stage.store.damage(name)
    result = stage.do("restore", manifest=manifest.name)
    assert result["damaged"] and "it is damaged" in result["error"]
    assert not stage.worker.turn()
    stage.store.delete(name)
    assert stage.do("restore", manifest=manifest.name)["damaged"]


def changed_schema(**feature: Any) -> Schema:
    user, hour = samples.TABLES["ro"]
    return schema_from_dict({**samples.TABLES, "ro": [user, {**hour, **feature}]})


def test_an_incompatible_schema_is_refused() -> None:
    stage = Stage()
    old = changed_schema(kind="ids", table="item")
    stage.known[old.fingerprint] = old
    stage.put(dataclasses.replace(stage.committed(), schema=f"{old.fingerprint:016x}"))
    result = stage.do("restore", manifest="manifests/00000001")
    assert not result["ok"] and not result["damaged"]
    with pytest.raises(SchemaError, match=r"feature 'hour': expected kind 'float' .*, got 'ids'"):
        stage.worker.turn()
    assert isinstance(stage.worker.refusal, SchemaError), (
        "by it the program ends as one whose training is held"
    )


def test_offsets_of_another_kafka_are_refused() -> None:
    stage = Stage()
    stage.committed()
    other = Stage(stage.store, kafka={"cluster_id": "d", "topics": {"samples": "2"}})
    result = other.do("restore", manifest="manifests/00000001")
    assert not result["damaged"], "an older manifest would not be any better"
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
    stage = Stage()
    stage.committed()
    stage.built.loop.model_config = model
    error = stage.do("restore", manifest="manifests/00000001")["error"]
    assert f"expected the model's {difference}" in error


def test_a_manifest_without_a_model_kind_is_restored() -> None:
    stage = Stage()
    before = stage.committed()
    stage.put(dataclasses.replace(before, model={k: v for k, v in before.model.items() if k != "kind"}))
    assert "error" not in stage.do("restore", manifest=before.name)


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
    stage = Stage().started()

    def step() -> bool:
        raise error

    monkeypatch.setattr(stage.built.loop, "step", step)
    assert stage.worker.turn() is False and not stage.worker.training
    assert stage.worker.report()["fatal"].startswith("out of memory: ") and stage.worker.report()["broken"]


def test_a_worker_with_another_schema_than_the_controller_waits() -> None:
    """While programs are started again with another file: a commit that names one schema has nothing written
    by the other."""
    stage = Stage()
    result = stage.do("restore", manifest="", schema="00000000000000aa")
    assert result["away"] and "expected the controller's schema 00000000000000aa" in result["error"]
    assert not stage.worker.turn() and stage.worker.broken
    assert stage.do("restore", manifest="", schema=f"{stage.worker.loop.schema.fingerprint:016x}")["ok"]
