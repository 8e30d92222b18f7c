"""Which parts a schema and a ranker's configuration ask for; a model concatenates what they give."""

from __future__ import annotations

from roostream.errors import SchemaError
from roostream.models.config import HstuConfig, RankerConfig
from roostream.models.parts import Embeddings, Floats, HistoryAttention, Part
from roostream.models.sequence.hstu_part import HstuTargets
from roostream.models.user_arch import UserArch
from roostream.schema.schema import Schema


def request_parts(schema: Schema, config: RankerConfig) -> dict[str, Part]:
    """Name → part that the request's tower reads; parts that would have no columns are left out."""
    if config.request_side == "userarch":
        return {}
    parts: dict[str, Part] = {"floats": Floats(schema, "ro"), "embeddings": Embeddings(schema, "ro")}
    return {name: part for name, part in parts.items() if part.width}


def user_arch(schema: Schema, config: RankerConfig) -> UserArch | None:
    """None where none is asked for, or where it would have nothing to compress."""
    return UserArch(schema, config) if config.request_side != "direct" and schema.ro else None


def candidate_parts(schema: Schema, config: RankerConfig) -> dict[str, Part]:
    """Name → part that runs once a candidate. What looks at a history needs a candidate's id features to ask with.

    Raises:
        SchemaError: HSTU without a sequence, or without a candidate's ids.
    """
    parts: dict[str, Part] = {"floats": Floats(schema, "nro"), "embeddings": Embeddings(schema, "nro")}
    for f in schema.lists("ro") if schema.lists("nro") else ():
        if f.kind != "sequence":
            continue
        if config.history_attention:
            parts[f"attention_{f.name}"] = HistoryAttention(schema, f, config)
        if isinstance(config, HstuConfig):
            parts[f"hstu_{f.name}"] = HstuTargets(schema, f, config)
    if isinstance(config, HstuConfig) and not any(isinstance(part, HstuTargets) for part in parts.values()):
        raise SchemaError(
            "expected an [[ro]] sequence and [[nro]] ids for HSTU, got none; add them, or take kind = 'ranker'"
        )
    return {name: part for name, part in parts.items() if part.width}
