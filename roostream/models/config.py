"""Settings of models. Every manifest contains them, so serving builds the model that the trainer trained."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.schema.settings import Settings, setting, setting_error

_WIDEST = 4096

LossName = Literal["log", "fnw", "fnc", "dfm", "es_dfm"]
"""Treatment of late labels, see roostream/models/loss.py."""

InteractionName = Literal["cross", "dot", "mix"]
"""Interactions of a DHEN layer: a class each in roostream/models/interaction_layers.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Settings of every kind of model; each kind adds its own."""

    kind: str = setting("ranker", "kind of model, see roostream/models/build.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomModelConfig(ModelConfig):
    """Settings of a custom model; `Config` of its module extends this class
    (docs/bring-your-own-model.md)."""

    kind: str = setting(
        "", "location of the code: FILE.py:FUNCTION relative to the TOML, or PACKAGE.MODULE:FUNCTION"
    )
    code: str = setting("", "sha256 of that code, in hex; '' is filled in, any other value must match")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(ModelConfig):
    """Widths count float32 numbers. With the defaults a batch trains in a few ms on one core."""

    request_layers: tuple[int, ...] = setting(
        (64, 32), "widths of the layers of the request tower, run once per request", ge=1, le=_WIDEST
    )
    request_side: Literal["direct", "userarch", "both"] = setting(
        "direct", "encoder of request features: the request tower, UserArch, or both"
    )
    userarch_embeddings: int = setting(
        4, "number of embeddings after UserArch's compression", ge=1, le=_WIDEST
    )
    userarch_width: int = setting(16, "width of each UserArch embedding", ge=1, le=_WIDEST)
    normalize_rows: bool = setting(
        False,
        "normalize each feature's pooled rows, if wider than 1, to mean 0 and variance 1 (LayerNorm)",
    )
    history_attention: bool = setting(True, "each candidate attends to the request's sequences")
    history_width: int = setting(32, "width of the history attention", ge=1, le=_WIDEST)
    history_heads: int = setting(
        2, "heads of the history attention, a divisor of history_width", ge=1, le=_WIDEST
    )
    time_buckets: int = setting(
        64,
        "time buckets, ln(seconds since the entry) / 0.301, for sequences with a time column",
        ge=1,
        le=_WIDEST,
    )
    interaction: Literal["dcn", "dhen"] = setting(
        "dcn", "feature interaction: DCNv2's cross network, or DHEN"
    )
    cross_layers: int = setting(2, "DCNv2 layers; 0 = none", ge=0, le=16)
    cross_rank: int = setting(32, "rank of a cross layer's matrix; 0 = full", ge=0, le=_WIDEST)
    dhen_layers: int = setting(2, "DHEN layers", ge=1, le=16)
    dhen_interactions: tuple[InteractionName, ...] = setting(
        ("cross", "dot", "mix"), "interactions that a DHEN layer sums, each at most once"
    )
    dhen_tokens: int = setting(8, "tokens of a candidate", ge=1, le=_WIDEST)
    dhen_width: int = setting(16, "width of a token", ge=1, le=_WIDEST)
    width: int = setting(64, "width of a candidate after the interaction", ge=1, le=_WIDEST)
    list_layers: int = setting(
        1,
        "attention blocks over the candidates of a request; 0 = candidates do not see each other",
        ge=0,
        le=16,
    )
    list_heads: int = setting(4, "heads of these blocks, a divisor of width", ge=1, le=_WIDEST)
    deep_layers: tuple[int, ...] = setting(
        (64,), "widths of the layers shared by all tasks", ge=1, le=_WIDEST
    )
    task_layers: tuple[int, ...] = setting(
        (32,), "widths of the layers of each task's tower", ge=1, le=_WIDEST
    )
    first_order: bool = setting(
        True, "start with the order by click rate, if the rank of a rate is among the candidate's floats"
    )
    linear: bool = setting(
        True, "mix in a linear model of the candidate's floats, which learns faster than the network"
    )
    linear_knots: bool = setting(
        True, "the linear model bends at two knots of each float, and sees the request's floats too"
    )
    scale_rates: bool = setting(
        True, "multiply rates of counters by 8, because they vary less than other floats"
    )
    prior: float = setting(0.1, "probability that an untrained model predicts", gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dhen_interactions or len(set(self.dhen_interactions)) < len(self.dhen_interactions):
            raise setting_error(
                "dhen_interactions", "one or more of cross, dot, mix, each once", list(self.dhen_interactions)
            )
        for name, divisor in (("history_width", "history_heads"), ("width", "list_heads")):
            width, heads = getattr(self, name), getattr(self, divisor)
            if width % heads:
                raise setting_error(divisor, f"a divisor of {name} = {width}", heads, "change one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HstuSettings(Settings):
    """Settings of HSTU encoders."""

    hstu_layers: int = setting(2, "number of HSTU layers", ge=1, le=64)
    hstu_width: int = setting(32, "width of the HSTU layers", ge=1, le=_WIDEST)
    hstu_heads: int = setting(2, "heads of the HSTU layers, a divisor of hstu_width", ge=1, le=_WIDEST)
    max_history: int = setting(
        256,
        "newest entries of a history that are used; attention is divided by this number + 1",
        ge=1,
        le=1 << 16,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hstu_width % self.hstu_heads:
            raise setting_error(
                "hstu_heads",
                f"a divisor of hstu_width = {self.hstu_width}",
                self.hstu_heads,
                "change one of them",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HstuConfig(RankerConfig, HstuSettings):
    """A ranker with HSTU: each candidate is a target at the end of its request's history."""

    kind: str = setting("hstu", "kind of model, see roostream/models/build.py")
    history_attention: bool = setting(False, "each candidate also attends to the request's sequences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(ModelConfig, HstuSettings):
    """A request tower and an item tower."""

    kind: str = setting("two_tower", "kind of model, see roostream/models/build.py")
    stage: Literal["retrieval", "ranking"] = setting(
        "retrieval", "retrieval by dot product with an index, or early-stage ranking"
    )
    history: Literal["pooled", "hstu"] = setting(
        "pooled", "encoder of sequences in the request tower; pooled: only their mean"
    )
    user_layers: tuple[int, ...] = setting(
        (64,), "widths of the layers of the request tower, run once per request", ge=1, le=_WIDEST
    )
    item_layers: tuple[int, ...] = setting((64,), "widths of the layers of the item tower", ge=1, le=_WIDEST)
    item_floats: tuple[str, ...] = setting(
        (), "[[nro]] floats, after transforms, that depend only on the item"
    )
    width: int = setting(32, "width of the request and item vectors", ge=1, le=_WIDEST)
    temperature: float = setting(0.05, "retrieval: divisor of the dot products of unit vectors", gt=0, le=100)
    uniform_negatives: float = setting(
        0.0,
        "retrieval: additional weight of each distinct item of a batch as a negative, independent of "
        "popularity",
        ge=0,
        le=1000,
    )
    popularity: str = setting(
        "",
        "retrieval: [[nro]] float, after transforms, with the number of times an item was shown; '' = its "
        "count in the batch",
    )
    mix_layers: tuple[int, ...] = setting(
        (64,), "ranking: widths of the layers over both vectors and their product", ge=1, le=_WIDEST
    )
    task_layers: tuple[int, ...] = setting(
        (32,), "ranking: widths of the layers of each task's tower", ge=1, le=_WIDEST
    )
    prior: float = setting(0.1, "probability that an untrained model predicts", gt=0, lt=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CascadeConfig(RankerConfig):
    """A ranker and a two-tower retrieval model, trained together."""

    kind: str = setting("cascade", "kind of model, see roostream/models/build.py")
    retrieval: TwoTowerConfig = setting(factory=TwoTowerConfig, help="table: settings of the retrieval model")
    retrieval_weight: float = setting(
        1.0, "weight of the retrieval loss relative to the ranker's", ge=0, le=1000
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retrieval.stage != "retrieval" or self.retrieval.kind != "two_tower":
            raise setting_error(
                "retrieval",
                'two towers of stage "retrieval"',
                self.retrieval.stage,
                "leave kind and stage out",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig(ModelConfig):
    """TorchRec's `DLRM` over the schema's floats and lists. Keys are named as its arguments; all tables need
    one width."""

    kind: str = setting("dlrm", "kind of model, see roostream/models/build.py")
    features: tuple[str, ...] = setting(
        (),
        "list features to use; () = all; FEATURE.COLUMN is an id column of a request-only sequence, with a "
        "table",
    )
    embedding_dim: int = setting(0, "width that all tables must have; 0 = the schema's", ge=0, le=_WIDEST)
    dense_arch_layer_sizes: tuple[int, ...] = setting(
        (),
        "widths of the layers over the floats; the last is the tables' width; () = 64, then that width",
        ge=1,
        le=_WIDEST,
    )
    over_arch_layer_sizes: tuple[int, ...] = setting(
        (),
        "widths of the layers after the interaction, at least two; the last is the number of labels; () = "
        "64, 32, then that number",
        ge=1,
        le=_WIDEST,
    )
    first_order: bool = setting(
        True, "start with the order by click rate, if the rank of a rate is among the candidate's floats"
    )
    linear: bool = setting(
        True, "mix in a linear model of the candidate's floats, which learns faster than the network"
    )
    linear_knots: bool = setting(
        True, "the linear model bends at two knots of each float, and sees the request's floats too"
    )
    scale_rates: bool = setting(
        True, "multiply rates of counters by 8, because they vary less than other floats"
    )
    prior: float = setting(0.1, "probability that an untrained model predicts", gt=0, lt=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.over_arch_layer_sizes) == 1:
            expected = "two widths or more, as TorchRec's OverArch needs"
            raise setting_error("over_arch_layer_sizes", expected, list(self.over_arch_layer_sizes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DcnConfig(DlrmConfig):
    """TorchRec's `DLRM_DCN`: DLRM with DCNv2's low-rank cross network as interaction."""

    kind: str = setting("dcn", "kind of model, see roostream/models/build.py")
    dcn_num_layers: int = setting(2, "layers of the cross network", ge=1, le=16)
    dcn_low_rank_dim: int = setting(32, "rank of a cross layer's matrix", ge=1, le=_WIDEST)
