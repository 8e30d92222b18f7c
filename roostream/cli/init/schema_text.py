"""The commented TOML files that `roostream init` writes: a schema, a model, and the map of a flat table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from roostream.cli.init.detect_log import FoundFeature, FoundLog
from roostream.replay.log_advice import prior_of
from roostream.schema.counter_plan import REQUEST_FIELDS
from roostream.schema.schema import Limits

_DIM = 8
_ROW_BYTES = 2 * 4 * _DIM  # weights and adagrad's accumulators, 4 bytes each
_LIVES = ("10m", "1h", "24h")
_OF_ALL_TIME = {
    "item_views": 'event = "shown"',
    "item_clicks": 'aggregation = "count"',
    "item_ctr": "",
}
_MAX_PAIRS = 3
_MAX_LABELS = 8
_MIN_FOR_PRIOR = 1000  # candidates
_MAX_NAME = 64  # characters
_DEFAULTS = Limits()
_quoted = partial(json.dumps, ensure_ascii=False)  # TOML has no escapes for pairs of surrogates

MODEL = """\
# The model: the default ranker. Each key can be deleted; then it has its default, which is the value here.
# docs/models.md describes all keys. `--set model.KEY=VALUE` of `roostream replay` tries others.
kind = "ranker"
width = 64             # of a candidate's vector
list_layers = 1        # attention over the candidates of a request; 0 = candidates do not see each other
cross_layers = 2       # products of features
deep_layers = [64]     # layers that all labels share
task_layers = [32]     # layers of each label
first_order = true     # start with the order by click rate instead of none
linear = true          # mix in a linear model of the candidate's numbers, which learns faster
"""


def schema_text(name: str, log: FoundLog, source: str) -> str:
    """The schema of a log, as TOML: its own features, and the counters, ages and times that Roostream
    computes."""
    own = {f.name for f in log.features}
    parts = [
        f"# Schema of {source}, written by `roostream init`. docs/schema.md describes every key.\n"
        "# A part goes from one blank line to the next. Each part can be deleted alone, except the first\n"
        "# two and the labels. Sizes are for each item, user or pair that occurs.\n"
        f"name = {_quoted(name)}\n\n"
        f"[online]\nclick = {_quoted(log.click)}    # the action that histories and rates count",
        *_limits(log),
        *_tables(log, own),
        *_ids(log, own),
        *_sent_features(log),
        *_online_features(log, own),
        *_labels(log),
    ]
    return "\n\n".join(parts) + "\n"


def _limits(log: FoundLog) -> Iterator[str]:
    """The limits that the log's longest lists need, rounded up to a power of 2."""
    found = {
        "max_candidates": log.max_candidates,
        "max_list": max((f.longest for f in log.features), default=0),
    }
    lines = [
        f"{key} = {1 << (longest - 1).bit_length()}    # the longest list of the log has {longest:,}"
        for key, longest in found.items()
        if longest > getattr(_DEFAULTS, key)
    ]
    if lines:
        yield "\n".join(["# What serving and the joiner accept.", "[limits]", *lines])


def _tables(log: FoundLog, own: set[str]) -> Iterator[str]:
    tables = dict.fromkeys(["item", *(["user"] if log.users > 0 and "user" not in own else [])])
    for f in log.features:
        tables |= dict.fromkeys([_table(f)] if f.kind != "float" else [])
        tables |= dict.fromkeys(column for column, kind in f.columns.items() if kind == "ids")
    for table in tables:
        yield (
            f"# Embeddings: {_ROW_BYTES} bytes on a shard for each id. Delete a table together with the\n"
            "# features that use it.\n"
            f"[tables.{table}]\ndim = {_DIM}"
        )


def _ids(log: FoundLog, own: set[str]) -> Iterator[str]:
    if "item" not in own:
        yield (
            "# The candidate's own id. It costs a row of the table; serving and replays fill it in.\n"
            '[[nro]]\nname = "item"\nkind = "ids"\ntable = "item"'
        )
    if _has_users(log, own) and "user" not in own:
        yield (
            "# The user's own id. It costs a row of the table; serving and replays fill it in.\n"
            '[[ro]]\nname = "user"\nkind = "ids"\ntable = "user"'
        )
    if "history" not in own and not log.is_anonymous:
        who, counters, online = "user", "", "history"
        if not _has_users(log, own):
            who, online = "session", "session_history"
            counters = _session_counter(online, "history") + _session_counter(f"{online}_len", "length")
        yield (
            f"# The {who}'s newest clicks, which candidates attend to: 16 bytes in Redis for each entry,\n"
            f"# and the time of an attention over the list.\n{counters}"
            '[[ro]]\nname = "history"\nkind = "sequence"\ntable = "item"\nmax_len = 50\n'
            f'columns = {{ time = "time_ms" }}\nonline = "{online}"'
        )


def _session_counter(name: str, aggregation: str) -> str:
    return f'[[counter]]\nname = "{name}"\nentity = "session"\naggregation = "{aggregation}"\n'


def _sent_features(log: FoundLog) -> Iterator[str]:
    """The features that clients send."""
    for f in log.features:
        side = "a candidate" if f.side == "nro" else "the request"
        yield f"# Of the log, a feature of {side}; clients send it. It costs {_cost(f)}.\n{_declared(f)}"


def _cost(f: FoundFeature) -> str:
    if f.kind != "float":
        return "a row of its table for each id"
    return (
        "one number of input, and one for its rank in the list" if f.side == "nro" else "one number of input"
    )


def _declared(f: FoundFeature) -> str:
    lines = [f"[[{f.side}]]", f'name = "{f.name}"']
    if f.kind != "float":
        lines += [f'kind = "{f.kind}"', f'table = "{_table(f)}"']
    if f.kind == "sequence":
        columns = ", ".join(f'{column} = "{kind}"' for column, kind in f.columns.items())
        tables = ", ".join(f'{column} = "{column}"' for column, kind in f.columns.items() if kind == "ids")
        lines += [f"columns = {{ {columns} }}"] if columns else []
        lines += [f"column_tables = {{ {tables} }}"] if tables else []
    if f.longest > _DEFAULTS.max_list:
        lines += [
            f"max_len = {_DEFAULTS.max_list}    # the first entries are used, so the newest must be first"
        ]
    if f.kind == "float" and f.side == "nro" and len(f"{f.name}_rank") <= _MAX_NAME:
        lines += ["", "[[transform]]", f'input = "{f.name}"', 'op = "rank"']
    return "\n".join(lines).replace("\n\n", "\n")


def _table(f: FoundFeature) -> str:
    return f.key if f.kind == "sequence" and f.key != "ids" else f.name


def _has_users(log: FoundLog, own: set[str]) -> bool:
    return log.users > 0 or "user" in own


def _online_features(log: FoundLog, own: set[str]) -> Iterator[str]:
    """The features that Roostream computes: counters, ages and times. A name that the log uses stays the
    log's."""
    request = [n for n in ("history_len", "hour_of_day", "num_candidates") if n not in own]
    if not _has_users(log, own):
        request = [n for n in request if n != "history_len"]
        request += ["session_history_len"] if "history" not in own and not log.is_anonymous else []
    if request:
        logs = [n for n in request if n != "hour_of_day"]
        yield (
            "# Of the request itself: one number of input each, and no state beyond the history.\n"
            + _online("ro", request)
            + (f"\n{_transform(logs, 'log1p')}" if logs else "")
        )
    for life in _LIVES:
        names = [f"{what}_{life}" for what in ("clicks", "views", "expected", "ctr")]
        names = [name for name in names if name not in own]
        counts = [name for name in names if not name.startswith("ctr_")]
        extra = f"\n{_transform(counts, 'log1p')}" if counts else ""
        if names:
            yield (
                f"# Clicks, views, expected clicks and click rate of the item, half-life {life}, and how\n"
                f"# they compare within the list: 36 bytes in Redis for each item, and {3 * len(names)} "
                f"numbers of input.\n"
                f"{_online('nro', names)}\n{_transform(names, 'rank', 'share')}{extra}"
            )
    yield from _all_time_counters(log, own)
    if "age_s" not in own:
        yield (
            "# Time since the item was first shown: 12 bytes in Redis for each item, and 3 numbers of\n"
            f"# input.\n{_online('nro', ['age_s'])}\n{_transform(['age_s'], 'rank', 'share')}\n"
            f"{_transform(['age_s'], 'log1p')}"
        )
    pair = [n for n in ("user_views", "user_clicks") if n not in own]
    if pair and _has_users(log, own):
        yield (
            "# How often this user was shown and clicked the item: 24 bytes in Redis for each of the user's\n"
            f"# 512 newest items.\n{_online('nro', pair)}\n{_transform(pair, 'log1p')}"
        )
    for f in _shared_ids(log, own):
        counter = f"user_{f.name}_ctr"
        yield (
            f"# This user's clicks per view by {f.name}, and its rank in the list: 24 bytes in Redis for\n"
            f"# each of the user's 512 newest values, and 2 numbers of input.\n"
            f'[[counter]]\nname = "{counter}"\nentity = ["user", "{f.name}"]\naggregation = "rate"\n'
            f"{_online('nro', [counter])}\n{_transform([counter], 'rank')}"
        )


def _all_time_counters(log: FoundLog, own: set[str]) -> Iterator[str]:
    """Counters of an item over all time."""
    if own & set(_OF_ALL_TIME):
        return
    share = log.actions.get(log.click, 0) / log.candidates
    prior = float(f"{min(max(share, 1e-6), 0.9):.2g}")
    counters = {**_OF_ALL_TIME, "item_ctr": f'aggregation = "rate"\nprior = {prior:g}'}
    lines = [f'[[counter]]\nname = "{name}"\nentity = ["item"]\n{rest}' for name, rest in counters.items()]
    log_rate = f"mean = {math.log(prior):.2f}\nstd = 2.0"
    yield (
        "# Clicks and views of the item since it was first shown, for items that stay for days. The rate\n"
        "# counts ten views of an average item in advance, and its rank is what an untrained model orders\n"
        "# by: 16 bytes in Redis for each item, and 8 numbers of input.\n"
        + "\n".join(lines)
        + f"\n{_online('nro', list(counters))}\n{_transform(list(counters), 'rank')}\n"
        f"{_transform(['item_views', 'item_clicks'], 'log1p')}\n"
        '[[transform]]\ninput = "item_ctr"\nop = "log"\noutput = "item_ctr_log"\n'
        f'[[transform]]\ninput = "item_ctr_log"\nop = "standardize"\n{log_rate}'
    )


def _shared_ids(log: FoundLog, own: set[str]) -> list[FoundFeature]:
    """Ids of candidates that several items share, those with the fewest values first."""
    shared = [
        f
        for f in log.features
        if f.side == "nro"
        and f.kind == "ids"
        and _table(f) != "item"
        and f.name not in (*REQUEST_FIELDS, "item")  # an entity takes these for its own fields
        and 2 <= f.distinct <= log.items / 2
        and f"user_{f.name}_ctr" not in own
        and len(f.name) <= 40
    ]
    return sorted(shared, key=lambda f: f.distinct)[:_MAX_PAIRS] if _has_users(log, own) else []


def _online(side: str, names: Sequence[str]) -> str:
    return f'[[{side}]]\nonline = "{_family(names)}"'


def _family(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"


def _transform(names: Sequence[str], *ops: str) -> str:
    shown = f'"{ops[0]}"' if len(ops) == 1 else "[" + ", ".join(f'"{op}"' for op in ops) + "]"
    return f'[[transform]]\ninputs = ["{_family(names)}"]\nop = {shown}'


def _labels(log: FoundLog) -> Iterator[str]:
    names = sorted(log.actions, key=lambda name: (name != log.click, -log.actions[name]))
    taken = set[str]()
    for number, action in enumerate(names[:_MAX_LABELS], 1):
        name = _label_name(action)
        name = f"label_{number}" if not name or name in taken else name
        taken.add(name)
        share = log.actions[action] / log.candidates
        prior = ""
        if log.is_complete and log.candidates >= _MIN_FOR_PRIOR and 0 < share < 1:
            prior = (
                f"\nprior = {prior_of(share)}    # predicted before training: the log's share of candidates"
            )
        yield (
            f"# What to predict: did the user do {_quoted(action)}?\n"
            f"[[label]]\nname = {_quoted(name)}\naction = {_quoted(action)}{prior}"
        )


def _label_name(action: str) -> str:
    """The action as a name of the schema; "" without a Latin letter or digit."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in action.lower()).strip(
        "_-"
    )[:_MAX_NAME]


def map_text(log: FoundLog) -> str:
    """The map of a flat table, for `roostream import table`."""
    m = log.map
    lines = [
        "# Which column is what, for `roostream import table`, as `roostream init` found it.",
        "# docs/bring-your-own-data.md describes every key.",
        f"request = {_quoted(m['request'])}    # rows with equal values here are one request",
        *(f"{k} = {_quoted(v)}" for k, v in m.items() if k not in ("request", "features", "actions")),
        *_section("features", m["features"].items()),
    ]
    if m["actions"]:
        lines += ["", "[actions]    # where the column is true, above 0 or at least `least`, or has the item"]
    for action, condition in m["actions"].items():
        columns = ", ".join(f"{key} = {_quoted(value)}" for key, value in condition.items())
        lines.append(f"{_quoted(action)} = {{ {columns} }}")
    return "\n".join(lines) + "\n"


def _section(name: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"{_quoted(key)} = {_quoted(value)}" for key, value in pairs]
    return ["", f"[{name}]", *lines] if lines else []
