"""Whatever archivers and compactors do, and in whatever order, a session reads what the topics say."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import LocalSessionRows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.archive_runs import TOPIC_IDS, make_archiver
from tests.warehouse.sample_cases import make_correction, rich_records
from tests.warehouse.test_compactor import DAY_MS, SCHEMA, closed_on, make_compactor, seal_all

PER_DAY, DAYS, STEPS = 6, 4, 24
ALL = [
    record
    for day in range(DAYS)
    for record in closed_on(rich_records(SCHEMA, PER_DAY * DAYS, partition=0)[PER_DAY * day :][:PER_DAY], day)
]
Labels = dict[int, np.ndarray]
"""Sample id → labels [n, T]."""


class History:
    """Topics of one partition, two archivers and two compactors of one warehouse."""

    def __init__(self, location: Path, rng: random.Random) -> None:
        self.location, self.rng, self.sent = location, rng, 0
        self.records = sorted(ALL, key=lambda record: record.timestamp_ms / DAY_MS + 1.5 * rng.random())
        self.topics: dict[str, list[Record]] = {"samples": [], "corrections": []}
        memory = MemoryStore()
        self.archivers = [make_archiver(location, [], [0], memory=memory) for _ in range(2)]
        self.compactors = [make_compactor(location, vacuum_after_hours=1) for _ in range(2)]
        for archiver, _, _ in self.archivers:
            archiver.open()

    def append(self, record: Record) -> None:
        record = record._replace(offset=len(self.topics[record.topic]))
        self.topics[record.topic].append(record)
        for _, reader, _ in self.archivers:
            reader.append([record])

    def send_samples(self) -> None:
        for record in self.records[self.sent :][: self.rng.randint(1, 6)]:
            self.append(record)
            self.sent += 1

    def send_a_sample_again(self) -> None:
        if self.sent:
            self.append(self.records[self.rng.randrange(self.sent)])

    def correct(self) -> None:
        """Change labels of a few samples again and again, also before they are archived."""
        for record in self.rng.choices(self.records, k=8):
            if items := pb.Sample.FromString(record.value[2:]).item_ids:
                number = len(self.topics["corrections"])
                after = float(self.rng.randint(0, 1))
                self.append(make_correction(record, items[0], 0.0, after, offset=0, event=number + 1))

    def archive(self) -> None:
        archiver, _, dead = self.rng.choice(self.archivers)
        archiver.turn(0.0, max_records=self.rng.randint(1, 20))
        archiver.flush()
        assert not dead

    def seal(self) -> None:
        seal_all(self.rng.choice(self.compactors))

    def merge(self) -> None:
        self.rng.choice(self.compactors).merge_corrections()

    def vacuum(self) -> None:
        self.rng.choice(self.compactors).vacuum()

    def finish(self) -> None:
        """Archive everything, and seal what is due."""
        while self.sent < len(ALL):
            self.send_samples()
        for archiver, reader, _ in self.archivers:
            while not reader.at_end():
                archiver.turn(0.0)
                archiver.flush()
        self.seal()

    def expected(self) -> tuple[Labels, Labels]:
        """Labels at the close, and after all corrections, of what the archivers have committed."""
        warehouse, committed = Warehouse(self.location), {}
        for name, table in warehouse.tables.items():
            end = table.snapshot().progress(f"{name}/{TOPIC_IDS[name]}/0") or 0
            committed[name] = [pb.Sample.FromString(r.value[2:]) for r in self.topics[name][:end]]
        streamed: Labels = {}
        items: dict[str, tuple[int, list[int]]] = {}
        for sample in committed["samples"]:
            labels = np.array(sample.labels, np.float32).reshape(-1, 2)
            streamed.setdefault(sample.sample_id, labels)
            items[sample.header.request_id] = sample.sample_id, list(sample.item_ids)
        latest = {id_: labels.copy() for id_, labels in streamed.items()}
        for correction in committed["corrections"]:
            if known := items.get(correction.header.request_id):
                is_item_N = np.array(known[1], np.uint64) == correction.item_ids[0]
                latest[known[0]][is_item_N] = correction.labels
        return streamed, latest

    def read(self, labels: str) -> Labels:
        table, found = SampleTable(str(self.location)), Labels()
        fixed = table.newest(SessionSpec(table="", version=0, labels=labels), {})  # type: ignore[arg-type]
        if fixed is None:
            return found
        session, files = table.open_session(fixed, SCHEMA)
        rows = LocalSessionRows(session, files)
        for split in session.order.splits:
            position = split.at
            while position < split.end_position:
                piece = rows.piece(split, position)
                batch, position = piece.batch, piece.end
                for row, id_ in enumerate(batch.sample_id_R.view(np.uint64).tolist()):
                    assert id_ not in found, "each sample is read once"
                    found[id_] = batch.label_BT[batch.request_index_B == row]
        return found


def test_a_session_reads_each_archived_sample_once_with_its_labels(tmp_path: Path) -> None:
    history = History(tmp_path, random.Random(1))
    steps: dict[Callable[[], None], int] = {
        history.send_samples: 4,
        history.correct: 4,
        history.archive: 8,
        history.seal: 3,
        history.send_a_sample_again: 1,
        history.merge: 1,
        history.vacuum: 1,
    }
    for step in [*history.rng.choices(list(steps), list(steps.values()), k=STEPS), history.finish]:
        step()
        for labels, expected in zip(("as_streamed", "latest"), history.expected(), strict=True):
            found = history.read(labels)
            assert found.keys() == expected.keys(), step
            assert all(np.array_equal(found[id_], expected[id_]) for id_ in expected), (step, labels)
    files = Warehouse(tmp_path).samples.snapshot().files
    assert len(expected) == len(ALL) and sum(file.sealed for file in files) >= DAYS - 1
