"""What a model looks like; kept in every manifest, so that serving builds the model that the trainer trained."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.schema.settings import Settings, setting, setting_error

_WIDEST = 4096

LossName = Literal["log", "fnw", "fnc", "dfm", "es_dfm"]
"""How labels that come late are met: a row of roostream/models/loss.py."""

InteractionName = Literal["cross", "dot", "mix"]
"""What a layer of DHEN adds up: a class each in roostream/models/interaction_layers.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """What every kind of model has; a kind's own class adds its settings."""

    kind: str = setting("ranker", "which kind of model, a row of roostream/models/build.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomModelConfig(ModelConfig):
    """Of a model that a user brings; `Config` of its module extends it (docs/bring-your-own-model.md)."""

    kind: str = setting("", "where its code is: FILE.py:FUNCTION beside the TOML, or PACKAGE.MODULE:FUNCTION")
    code: str = setting(
        "", "sha256 of that code, in hex; whatever is given must be found, and '' is filled in"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankerConfig(ModelConfig):
    """All widths are numbers of float32; the defaults train in a few ms a batch on one core."""

    request_layers: tuple[int, ...] = setting(
        (64, 32), "layers of the tower that runs once a request", ge=1, le=_WIDEST
    )
    request_side: Literal["direct", "userarch", "both"] = setting(
        "direct", "that tower, UserArch, or both beside each other"
    )
    userarch_embeddings: int = setting(
        4, "embeddings that UserArch compresses the request's to", ge=1, le=_WIDEST
    )
    userarch_width: int = setting(16, "width of each", ge=1, le=_WIDEST)
    normalize_rows: bool = setting(
        False,
        "each feature's pooled rows, if wider than 1, are brought to mean 0 and variance 1 (LayerNorm) before they are read",
    )
    history_attention: bool = setting(True, "each candidate attends to the request's sequences")
    history_width: int = setting(32, "width of that attention", ge=1, le=_WIDEST)
    history_heads: int = setting(2, "its heads, a divisor of history_width", ge=1, le=_WIDEST)
    time_buckets: int = setting(
        64,
        "buckets of ln(seconds since the entry) / 0.301 in a sequence with a time column",
        ge=1,
        le=_WIDEST,
    )
    interaction: Literal["dcn", "dhen"] = setting(
        "dcn", "how a candidate's features meet: DCNv2's cross network, or DHEN"
    )
    cross_layers: int = setting(2, "DCNv2 layers; 0 = none", ge=0, le=16)
    cross_rank: int = setting(32, "rank of a cross layer's matrix; 0 = full", ge=0, le=_WIDEST)
    dhen_layers: int = setting(2, "DHEN layers", ge=1, le=16)
    dhen_interactions: tuple[InteractionName, ...] = setting(
        ("cross", "dot", "mix"), "what each of them adds up, each once"
    )
    dhen_tokens: int = setting(8, "tokens of a candidate", ge=1, le=_WIDEST)
    dhen_width: int = setting(16, "width of a token", ge=1, le=_WIDEST)
    width: int = setting(64, "width of a candidate after the interaction", ge=1, le=_WIDEST)
    list_layers: int = setting(
        1,
        "attention blocks over the candidates of a request; 0 = candidates don't see each other",
        ge=0,
        le=16,
    )
    list_heads: int = setting(4, "their heads, a divisor of width", ge=1, le=_WIDEST)
    deep_layers: tuple[int, ...] = setting((64,), "layers shared by all tasks", ge=1, le=_WIDEST)
    task_layers: tuple[int, ...] = setting((32,), "layers of each task's own tower", ge=1, le=_WIDEST)
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
    """Of whatever reads a history with HSTU."""

    hstu_layers: int = setting(2, "HSTU's layers", ge=1, le=64)
    hstu_width: int = setting(32, "their width", ge=1, le=_WIDEST)
    hstu_heads: int = setting(2, "their heads, a divisor of hstu_width", ge=1, le=_WIDEST)
    max_history: int = setting(
        256,
        "newest entries of a history that are read; attention is divided by this number + 1",
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
    """A ranker of which each candidate stands at the end of its request's history in HSTU."""

    kind: str = setting("hstu", "which kind of model, a row of roostream/models/build.py")
    history_attention: bool = setting(False, "each candidate attends to the request's sequences too")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(ModelConfig, HstuSettings):
    """A tower of the request and a tower of the item, which meet late."""

    kind: str = setting("two_tower", "which kind of model, a row of roostream/models/build.py")
    stage: Literal["retrieval", "ranking"] = setting(
        "retrieval", "a dot product of both for an index, or early-stage ranking"
    )
    history: Literal["pooled", "hstu"] = setting(
        "pooled", "how the request's tower reads sequences; pooled: their mean alone"
    )
    user_layers: tuple[int, ...] = setting(
        (64,), "layers of the request's tower, run once a request", ge=1, le=_WIDEST
    )
    item_layers: tuple[int, ...] = setting((64,), "layers of the item's tower", ge=1, le=_WIDEST)
    item_floats: tuple[str, ...] = setting(
        (), "[[nro]] floats, after transforms, that are the item's own whoever asks"
    )
    width: int = setting(32, "of the vectors in which they meet", ge=1, le=_WIDEST)
    temperature: float = setting(
        0.05, "retrieval: dot products of unit vectors are divided by it", gt=0, le=100
    )
    uniform_negatives: float = setting(
        0.0,
        "retrieval: how often each distinct item of a batch is a negative more, whatever its popularity",
        ge=0,
        le=1000,
    )
    popularity: str = setting(
        "",
        "retrieval: the [[nro]] float, after transforms, that counts how often an item is shown; '' = how often the batch has it",
    )
    mix_layers: tuple[int, ...] = setting(
        (64,), "ranking: layers over both vectors and their product", ge=1, le=_WIDEST
    )
    task_layers: tuple[int, ...] = setting(
        (32,), "ranking: layers of each task's own tower", ge=1, le=_WIDEST
    )
    prior: float = setting(0.1, "probability that an untrained model predicts", gt=0, lt=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CascadeConfig(RankerConfig):
    """A ranker, and two towers that find what it ranks, trained together."""

    kind: str = setting("cascade", "which kind of model, a row of roostream/models/build.py")
    retrieval: TwoTowerConfig = setting(
        factory=TwoTowerConfig, help="table: the two towers; their stage is retrieval"
    )
    retrieval_weight: float = setting(1.0, "of their loss beside the ranker's", ge=0, le=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.retrieval.stage != "retrieval" or self.retrieval.kind != "two_tower":
            raise setting_error(
                "retrieval",
                'two towers of stage "retrieval"',
                self.retrieval.stage,
                "leave kind and stage out",
            )
