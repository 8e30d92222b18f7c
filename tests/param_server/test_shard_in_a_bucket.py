"""A real shard process whose checkpoint store is a bucket: its disk is only a cache."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from roostream.runtime import manifest as manifests
from roostream.runtime.store_identity import init_store, open_checkpoint_store
from tests.param_server.shard_support import ITEM, TOPIC, MemoryStore, gradients_of, link_manifest, lookup_of
from tests.param_server.test_shard_process import Lead, Shard, client_to
from tests.runtime import s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server.running() as url:
        yield url


pytestmark = pytest.mark.usefixtures("s3")


def test_a_shard_whose_home_was_deleted_comes_back_bit_equal(
    shard: Shard, lead: Lead, tmp_path: Path
) -> None:
    url = f"s3://{s3_server.BUCKET}/deleted-home"
    store_id = init_store(url)
    store = open_checkpoint_store(url)
    shard.start(store=url)
    lead.do("restore", 1, manifest="", store=store_id)
    client, transport = client_to(shard.said("listens on"), 1)
    lookup = lookup_of({ITEM: range(200), TOPIC: range(20)})
    names = []
    for seq in (1, 2, 3):
        client.push(lookup, gradients_of(lookup, float(seq)), step=seq, time_ms=0)
        lead.do("freeze", 1, seq=seq, watermark_ms=0)
        written = lead.do("write", 1, seq=seq)
        memory = MemoryStore()
        names.append(link_manifest(memory, seq, 1, [written]))
        assert store.create(names[-1], memory.get(names[-1]))
        assert lead.do("commit", 1, seq=seq) == {"ok": True}
    committed = {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()}
    assert store.list("segments") == [f"segments/0-{seq}-1" for seq in (1, 2, 3)]
    transport.close()

    shard.end(signal.SIGKILL)
    shutil.rmtree(tmp_path / "shard-0")
    shard.log.write_text("")
    shard.start(store=url)
    lead.wait_for_process(2)
    assert lead.do("restore", 2, manifest=names[-1], store=store_id) == {"ok": True, "rows": 220}
    client, transport = client_to(shard.said("listens on"), 2)
    assert {stack: rows.tobytes() for stack, rows in client.pull(lookup).items()} == committed
    assert "fetched 3 segments from the checkpoint store: 660 rows" in shard.said("fetched")

    store.delete("segments/0-2-1")  # the home has it: nothing is fetched
    lead.do("restore", 3, manifest=names[-1], store=store_id)
    shard.end(signal.SIGKILL)
    shutil.rmtree(tmp_path / "shard-0")
    shard.start(store=url)
    lead.wait_for_process(3)
    refused = lead.do("restore", 4, manifest=names[-1], store=store_id)
    assert refused["damaged"] is True and "copy segments/0-2-1" in refused["error"]
    assert lead.do("restore", 5, manifest=names[0], store=store_id) == {"ok": True, "rows": 220}
    transport.close()
    assert shard.end(signal.SIGTERM) == 0
    assert "Traceback" not in shard.log.read_text()


def test_a_folder_on_the_same_machine_gets_no_copies_unless_asked_for(
    shard: Shard, lead: Lead, tmp_path: Path
) -> None:
    store = open_checkpoint_store(tmp_path / "store")
    for incarnation, wish in ((1, "auto"), (2, "always")):
        shard.start(upload_segments=wish)
        lead.wait_for_process(incarnation)
        manifest = manifests.manifest_name(1) if incarnation == 2 else ""
        lead.do("restore", incarnation, manifest=manifest)
        client, transport = client_to(shard.said("listens on"), incarnation)
        lookup = lookup_of({ITEM: range(20)})
        client.push(lookup, gradients_of(lookup, 1.0), step=incarnation, time_ms=0)
        lead.do("freeze", incarnation, seq=incarnation, watermark_ms=0)
        written = lead.do("write", incarnation, seq=incarnation)
        memory = MemoryStore()
        name = link_manifest(memory, incarnation, incarnation, [written])
        assert store.create(name, memory.get(name))
        lead.do("commit", incarnation, seq=incarnation)
        transport.close()
        shard.end(signal.SIGKILL)
        shard.log.write_text("")
        expected = ["segments/0-1-1", "segments/0-2-2"] if wish == "always" else []
        assert store.list("segments") == expected
