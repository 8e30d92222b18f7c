"""A saved batch in readable form: why, from where, and the numbers in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from roostream.cli.inspect_batch import describe_batch, rows
from roostream.cli.main import cli
from roostream.errors import ConfigError
from roostream.schema.registry import to_toml
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.test_saved_batch import SAVED
from trainer.saved_batch import SavedBatch, SavedBatches


def saved(*more: Record, **changed: Any) -> SavedBatch:
    told = {
        **vars(SAVED),
        "schema": to_toml(samples.schema()),
        "records": (*samples.records([1, 2, 3]), *more),
        **changed,
    }
    return SavedBatch(**told)


def large(number: int, partition: int, offset: int) -> Record:
    """A sample whose second candidate has a very large age."""
    message = pb.Sample.FromString(samples.sample(number)[2:])
    nro = {"item": list(message.item_ids), "age": [1.0, -3e9, 2.0]}
    message.parts[0].nro = encode_nro(samples.schema(), nro, 3)
    return Record("samples", partition, offset, message.close_ms, None, wire.encode(wire.SAMPLE, message))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["inspect", "batch", *arguments])


def test_everything_about_a_batch_is_reported() -> None:
    told = describe_batch(saved(large(7, 0, 5), Record("samples", 1, 9, 6, None, b"?")))
    assert [
        (at["topic"], at["partition"], at["first_offset"], at["last_offset"], at["count"])
        for at in told["records"]
    ] == [("samples", 0, 0, 5, 2), ("samples", 1, 0, 9, 3)]
    assert (told["requests"], told["candidates"], told["rejects"]) == (4, 12, {"undecodable": 1})
    assert told["features"]["hour"] == {
        "kind": "float",
        "min": 1.0,
        "mean": 3.25,
        "max": 7.0,
        "extreme": 0,
        "present": 1.0,
    }
    assert told["features"]["age"]["min"] == -3e9 and told["features"]["age"]["extreme"] == 1
    assert told["features"]["user"] == {"kind": "list", "present": 1.0, "longest": 1, "distinct": 4}
    assert told["largest"][0] == {
        "feature": "age",
        "value": -3e9,
        "partition": 0,
        "offset": 5,
        "correction": False,
    }
    assert told["tasks"]["click"]["largest_weight"] == 1.0 and told["findings"] == list(SAVED.findings)


def test_the_reason_comes_first_and_extreme_values_are_reported() -> None:
    lines = list(rows(describe_batch(saved(large(7, 0, 5)))))
    assert lines[:2] == [
        ("why", "nothing is finite"),
        ("not finite", "dense weight x: 3 of 9 numbers are not finite"),
    ]
    told = dict(lines)
    assert told["restored"] == "manifests/00000003 (checksum 00ff)" and told["not saved"].startswith(
        "2 more records"
    )
    assert "EXTREME: 1" in told["age"] and "EXTREME" not in told["hour"]
    assert ("largest", "age = -3e+09 in samples-0 offset 5") in lines


def test_a_batch_without_a_record_that_can_be_read_has_no_numbers() -> None:
    told = describe_batch(saved(records=(Record("samples", 0, 0, 0, None, b"?"),), manifest=""))
    assert told["requests"] == 0 and told["largest"] == [] and told["features"]["age"]["min"] is None
    assert (
        dict(rows(told))["restored"] == "the beginning"
        and dict(rows(told))["age"] == "no values, present in 0%"
    )


def test_the_command_prints_what_a_worker_saved(tmp_path: Path) -> None:
    path = SavedBatches(tmp_path).save(saved())
    shown = run(str(path))
    assert shown.exit_code == 0 and "nothing is finite" in shown.output and "samples-1 0..1" in shown.output
    assert json.loads(run(str(path), "--json").stdout) == describe_batch(saved())


@pytest.mark.parametrize(
    ("content", "message"), [(None, "got No such file or directory"), (b"\x00" * 40, "got something else")]
)
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.batch"
    if content is not None:
        path.write_bytes(content)
    error = run(str(path)).exception
    assert isinstance(error, ConfigError) and message in str(error) and str(error).startswith(str(path))


def test_a_schema_that_can_t_be_read_is_reported() -> None:
    with pytest.raises(ConfigError, match="expected the"):
        describe_batch(saved(schema="[["))
