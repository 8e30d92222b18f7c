"""Rows of a TorchRec EmbeddingBagCollection are imported into an empty home and exported again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import torch as safetensors
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM

from infra.options import load_saved_options
from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.initial_rows import initial_rows
from param_server.key_value_store import RocksDbStore
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.cli.main import cli
from roostream.errors import CheckpointError, ConfigError, RoostreamError, SchemaError, SetupError
from roostream.models.build import build_model, load_model_config
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.wire.lookup import Lookup, StackLookup
from serving.versions.version_follower import read_weights

SCHEMA = """
[tables.item]
dim = 4
[tables.user]
dim = 4
init_scale = 0.5
[tables.tag]
dim = 2
rule = "rowwise_adagrad"
[[ro]]
name = "user"
kind = "ids"
table = "user"
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[nro]]
name = "price"
[[label]]
name = "click"
action = "click"
"""
MODEL = """
import torch
from torchrec import EmbeddingBagConfig
from torchrec.models.dlrm import DLRM
from roostream.models.config import CustomModelConfig
from roostream.models.loss import loss
from roostream.models.model import Model
from roostream.models.custom.torchrec_bags import RemoteEmbeddingBagCollection, as_kjt, rows_of

class Shop(Model):
    def __init__(self, schema):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=t, embedding_dim=4, num_embeddings=1, feature_names=[t])
            for t in ("item", "user")
        ]
        self.dlrm = DLRM(RemoteEmbeddingBagCollection(tables, schema), 1, [8, 4], [8, 1])

    def forward(self, inputs):
        with rows_of(inputs):
            return self.dlrm(inputs.nro_float_BG, as_kjt(inputs))

    def loss(self, inputs, logits_BT, targets):
        return loss(logits_BT, targets)

def build(schema, config):
    return Shop(schema)
"""
SIZES, ITEM = {"item": 40, "user": 25}, "embedding_bags.item.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.toml").write_text(SCHEMA)
    (tmp_path / "shop.py").write_text(MODEL)
    (tmp_path / "model.toml").write_text('kind = "shop.py:build"\n')
    return tmp_path


def make_collection() -> EmbeddingBagCollection:
    torch.manual_seed(5)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=t, embedding_dim=4, num_embeddings=n, feature_names=[t])
            for t, n in SIZES.items()
        ]
    )


def run_command(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)])
    if isinstance(done.exception, RoostreamError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def run_import(folder: Path, state: Mapping[str, torch.Tensor], *more: object) -> str:
    safetensors.save_file(dict(state), folder / "in.safetensors")
    options = ("--schema", folder / "shop.toml", "--model", folder / "model.toml", "--home", folder / "home")
    return run_command("import", "--from", folder / "in.safetensors", *options, *more)


def run_export(folder: Path, *more: object) -> dict[str, torch.Tensor]:
    run_command("export", "--home", folder / "home", "--to", folder / "out.safetensors", *more)
    return safetensors.load_file(folder / "out.safetensors")


def pull_rows(folder: Path, table: str, *ids: int, num_shards: int = 2) -> np.ndarray:
    """Pull rows as a worker does, from shards that are restored in the home."""
    schema, store = load_schema(folder / "shop.toml"), FileStore(folder / "home" / "store")
    newest, incarnation = manifests.newest(store), manifests.claim_incarnation(store, 0)
    assert newest is not None
    shards, opened = [], []
    for index in range(num_shards):
        identity = ShardIdentity(schema=schema, index=index, num_shards=num_shards, publishing=False)
        opened.append(RocksDbStore(folder / "home" / f"shard-{index}" / "segments").open())
        segments = Segments(
            opened[-1],
            shapes_of(schema),
            identity.num_buckets,
            buckets=newest.manifest.owners.buckets_of(index),
        )
        shards.append(Shard(identity, segments, store, FakeClock(0)))
        shards[-1].restore(incarnation, newest.name)
    client = Client(schema, [InMemoryTransport(ShardRpcHandler(shard).handle) for shard in shards], worker=0)
    client.set_incarnation(incarnation)
    try:
        return client.pull(lookup_of(schema, table, ids))[schema.table_by_name[table].stack]
    finally:
        for blobs in opened:
            blobs.close()


def lookup_of(schema: Schema, table: str, ids: tuple[int, ...]) -> Lookup:
    stacks = {}
    for stack, tables in schema.stacks.items():
        stack_ids = [i for i in ids if table in {t.name for t in tables}]
        number = np.full(len(stack_ids), schema.table_by_name[table].id, np.uint32)
        stacks[stack] = StackLookup(number, np.array(stack_ids, np.int64), {})
    return Lookup(stacks)


def test_rows_round_trip_by_row_number(folder: Path) -> None:
    collection = make_collection()
    text = run_import(folder, collection.state_dict())
    assert "commit 1 with 65 rows of 2 tables and 0 of 8 dense weights" in text
    weight = collection.embedding_bags["item"].weight.detach().numpy()
    np.testing.assert_array_equal(pull_rows(folder, "item", 0, 39, 7), weight[[0, 39, 7]])
    out = run_export(folder)
    assert out.keys() == collection.state_dict().keys()
    assert all(torch.equal(out[name], value) for name, value in collection.state_dict().items())
    again = make_collection()
    again.load_state_dict(out)


def test_rows_with_other_ids_round_trip_by_a_map(folder: Path) -> None:
    collection = make_collection()
    id_N = np.random.default_rng(1).integers(-(1 << 62), 1 << 62, SIZES["item"])
    (folder / "ids.safetensors").write_bytes(tensor_file.encode({"item": id_N}, {}))
    run_import(folder, collection.state_dict(), "--ids", folder / "ids.safetensors")
    weight = collection.embedding_bags["item"].weight.detach()
    np.testing.assert_array_equal(pull_rows(folder, "item", int(id_N[3])), weight[[3]].numpy())
    with pytest.raises(CheckpointError, match=r"'item': expected ids that are row numbers, got"):
        run_export(folder)
    assert torch.equal(run_export(folder, "--ids", folder / "ids.safetensors")[ITEM], weight)
    (folder / "out.safetensors").unlink()
    out = run_export(folder, "--make-ids", folder / "made.safetensors")
    exported_ids, _ = tensor_file.decode((folder / "made.safetensors").read_bytes())
    assert exported_ids["item"].tolist() == sorted(id_N.tolist())
    assert exported_ids["user"].tolist() == list(range(SIZES["user"]))
    assert torch.equal(out[ITEM], weight[np.argsort(id_N)])


def test_missing_rows_have_initial_values_and_ids_without_a_number_are_reported(
    folder: Path,
) -> None:
    run_import(folder, make_collection().state_dict())
    wanted = np.array([3, 10**9, 4], np.int64)
    (folder / "ids.safetensors").write_bytes(tensor_file.encode({"user": wanted}, {}))
    arguments = (
        "--home",
        folder / "home",
        "--to",
        folder / "out.safetensors",
        "--ids",
        folder / "ids.safetensors",
    )
    assert "user: 23 rows skipped" in run_command("export", *arguments)
    out = safetensors.load_file(folder / "out.safetensors")["embedding_bags.user.weight"].numpy()
    table = load_schema(folder / "shop.toml").table_by_name["user"]
    np.testing.assert_array_equal(
        out[[1]], initial_rows(0, np.full(1, table.id, np.uint32), wanted[1:2], 4, 0.5)
    )
    assert out.shape == (3, 4)


def test_the_dense_weights_of_a_dlrm_are_imported(folder: Path) -> None:
    torch.manual_seed(6)
    dlrm = DLRM(make_collection(), 1, [8, 4], [8, 1])
    assert "8 of 8 dense weights" in run_import(folder, dlrm.state_dict())
    store = FileStore(folder / "home" / "store")
    newest = manifests.newest(store)
    assert newest is not None
    schema = load_schema(folder / "shop.toml")
    weights = read_weights(store, newest.manifest, schema)
    model = build_model(schema, load_model_config(str(folder / "model.toml")), 3)
    model.load_state_dict(weights, strict=True)
    dense = {name: value for name, value in dlrm.state_dict().items() if "embedding_bags" not in name}
    assert len(dense) == len(weights) == 8
    assert all(torch.equal(weights[f"own.dlrm.{name}"], value) for name, value in dense.items())


def test_a_dense_weight_that_is_not_finite_is_rejected_and_creates_no_home(folder: Path) -> None:
    state = DLRM(make_collection(), 1, [8, 4], [8, 1]).state_dict()
    name = next(name for name in state if "embedding_bags" not in name)
    with pytest.raises(CheckpointError, match=f"{name}: expected finite floats"):
        run_import(folder, state | {name: torch.full_like(state[name], torch.inf)})
    assert not (folder / "home").exists()


def test_the_home_remembers_schema_model_and_shards_for_up(folder: Path) -> None:
    run_import(folder, make_collection().state_dict(), "--shards", "3")
    options = load_saved_options(folder / "home")
    assert options is not None and options.num_shards == 3 and Path(options.schema) == folder / "shop.toml"
    assert (
        options.overrides["worker"]["model"]
        == options.overrides["serving"]["model"]
        == str(folder / "model.toml")
    )
    assert pull_rows(folder, "user", 1, num_shards=3).shape == (1, 4)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": torch.zeros(2, 2)}, "of a collection's state_dict, got w"),
        ({"embedding_bags.itm.weight": torch.zeros(2, 4)}, "got 'itm'; did you mean 'item'"),
        ({ITEM: torch.zeros(2, 8)}, r"expected \[N, 4\], as \[tables.item\] has dim = 4, got \[2, 8\]"),
        ({ITEM: torch.full((2, 4), torch.nan)}, "expected finite floats, got float32 or"),
        ({ITEM: torch.full((2, 4), 1e300, dtype=torch.float64)}, "expected finite floats, got float64 or"),
        ({ITEM: torch.zeros((2, 4), dtype=torch.int8)}, "expected finite floats, got int8"),
        ({ITEM: torch.zeros((2, 4), dtype=torch.bfloat16)}, "save it in float32 by safetensors"),
        ({f"{prefix}.{ITEM}": torch.zeros(2, 4) for prefix in "ab"}, "table 'item' once, got"),
    ],
)
def test_a_file_that_does_not_fit_is_rejected_and_creates_no_home(
    folder: Path, state: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises((CheckpointError, SchemaError), match=message):
        run_import(folder, state)
    assert not (folder / "home").exists()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"item": np.arange(5)}, "table 'item': expected 40 ids, one"),
        ({"item": np.zeros(40, np.int64)}, r"expected int64 \[N\], each id once, got int64 \[40\] with"),
        ({"item": np.zeros(40, np.float32)}, "expected int64"),
        ({"tag": np.arange(5)}, "expected ids of tables"),
    ],
)
def test_ids_that_do_not_fit_are_rejected(folder: Path, ids: dict[str, np.ndarray], message: str) -> None:
    (folder / "ids.safetensors").write_bytes(tensor_file.encode(ids, {}))
    with pytest.raises(CheckpointError, match=message):
        run_import(folder, make_collection().state_dict(), "--ids", folder / "ids.safetensors")
    assert not (folder / "home").exists()


def test_an_export_writes_both_of_its_files_or_none(folder: Path) -> None:
    run_import(folder, make_collection().state_dict())
    ids = folder / "ids.safetensors"
    ids.write_text("of the user")
    with pytest.raises(CheckpointError, match=r"ids.*be written"):
        run_export(folder, "--make-ids", ids)
    assert ids.read_text() == "of the user"
    ids.unlink()
    out = folder / "same.safetensors"
    with pytest.raises(SetupError, match="expected two files for --to and --make-ids"):
        run_command("export", "--home", folder / "home", "--to", out, "--make-ids", out)
    assert not out.exists()
    run_export(folder, "--make-ids", ids)
    assert ids.exists()


def test_import_needs_an_empty_home_and_export_a_new_file(folder: Path) -> None:
    run_import(folder, make_collection().state_dict())
    with pytest.raises(SetupError, match="expected a store without commits, got 1"):
        run_import(folder, make_collection().state_dict())
    run_export(folder)
    with pytest.raises(CheckpointError, match=r"be written"):
        run_export(folder)
    with pytest.raises(CheckpointError, match="expected ids of tables of the schema, got"):
        (folder / "ids.safetensors").write_bytes(tensor_file.encode({"itm": np.arange(2)}, {}))
        run_export(folder, "--ids", folder / "ids.safetensors")
    with pytest.raises(CheckpointError, match="expected a safetensors file, got No such file"):
        run_command("import", "--from", folder / "none.safetensors", "--home", folder / "other")


def test_options_of_collections_are_rejected_for_folders(folder: Path) -> None:
    run_import(folder, make_collection().state_dict())
    with pytest.raises(SetupError, match=r"--to"):
        run_command(
            "export", "--home", folder / "home", "--to", folder / "copy", "--ids", folder / "ids.safetensors"
        )
    with pytest.raises(SetupError, match=r"--from"):
        run_command(
            "import", "--from", folder / "copy", "--home", folder / "other", "--schema", folder / "shop.toml"
        )
    arguments = (
        "--from",
        folder / "in.safetensors",
        "--home",
        folder / "other",
        "--schema",
        folder / "none.toml",
    )
    with pytest.raises(ConfigError):
        run_command("import", *arguments)
