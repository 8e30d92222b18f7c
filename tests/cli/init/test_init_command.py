"""`roostream init` writes a valid schema, model and column map for a log. What it cannot decide, it asks for
in one sentence."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from roostream.cli.init import detect_log, init_command
from roostream.cli.init.init_command import init
from roostream.cli.replay import check_command
from roostream.errors import ConfigError
from roostream.models.build import load_model_config
from roostream.models.config import RankerConfig
from roostream.models.ranker import rate_rank
from roostream.replay import parquet_log
from roostream.replay.config import CheckConfig
from roostream.replay.import_map import load_map
from roostream.replay.table_import import import_table
from roostream.runtime.program import Stop
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema, schema_from_dict

T0 = 1_714_521_600_000


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str) -> Result:
    result = CliRunner().invoke(init, args)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def load_written_schema(name: str = "shop") -> Schema:
    return load_schema(Path(name) / "schema.toml")


def write_lines(name: str, lines: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def make_log(**ro: Any) -> list[dict[str, Any]]:
    request = {"request_id": "r1", "user_id": "ann", "time": T0}
    candidates = [
        {"item_id": f"i{n}", "category": ("hats", "bags")[n % 2], "price": 1.5 * n, "brand_id": n % 2}
        for n in range(4)
    ]
    return [
        {"type": "impression", **request, "ro": ro, "candidates": candidates},
        {"type": "engagement", **request, "item_id": "i1", "action": "open"},
    ]


def test_a_sample_log_is_written_with_its_schema_and_model_and_never_replaced() -> None:
    output = run("shop", "--requests", "200").output
    schema = load_written_schema()
    assert {f.name for f in schema.ro} >= {"user", "history", "basket_value"}
    assert {f.name for f in schema.nro} >= {"item", "category", "price", "expected_1h", "ctr_24h"}
    assert [label.name for label in schema.labels] == ["click", "order"]
    assert rate_rank(schema, "click") is not None, "an untrained model ranks by click rate"
    assert load_model_config("shop/model.toml") == RankerConfig()
    assert "roostream replay jsonl --schema shop/schema.toml" in output and "roostream up" in output
    with pytest.raises(ConfigError, match="not replaced"):
        run("shop", "--requests", "200")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_init_leaves_nothing_and_can_be_repeated(
    error: BaseException, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(init_command, "detect_log", fail)  # after the sample log was written
        with contextlib.suppress(KeyboardInterrupt):
            assert CliRunner().invoke(init, ["shop", "--requests", "200"]).exit_code != 0
    assert list(in_folder.iterdir()) == []
    run("shop", "--requests", "200")
    assert sorted(path.name for path in Path("shop").iterdir()) == ["log.jsonl", "model.toml", "schema.toml"]


def test_actions_of_the_sample_log_can_be_chosen() -> None:
    run("news", "--action", "open", "--second-action", "none", "--requests", "100")
    schema = load_written_schema("news")
    assert schema.online.click == "open" and [label.action for label in schema.labels] == ["open"]


def test_the_kind_of_a_feature_follows_from_its_values() -> None:
    write_lines(
        "log.jsonl",
        make_log(topics=["a", "b"], basket=3, front_page=1.0, past={"item": [1, 2], "at": [T0, T0]}),
    )
    output = run("shop", "--from", "log.jsonl").output
    schema = load_written_schema()
    kinds = {f.name: f.kind for f in (*schema.ro, *schema.nro)}
    assert kinds["topics"] == kinds["category"] == kinds["brand_id"] == "ids"
    assert kinds["basket"] == kinds["price"] == kinds["front_page"] == "float"
    past = next(f for f in schema.ro if f.name == "past")
    assert (past.table, past.columns) == ("item", {"at": "time_ms"})
    assert "'price' of a candidate is of kind float" in output and "'open'" in output


def test_features_of_the_log_replace_those_of_the_same_name() -> None:
    write_lines("log.jsonl", make_log(user="ann", hour_of_day=3.5))
    run("shop", "--from", "log.jsonl")
    features = {f.name: f for f in load_written_schema().ro}
    assert features["user"].kind == "ids" and features["hour_of_day"].online == ""


@pytest.mark.parametrize(
    ("engaged", "wanted"),
    [(["like", "share"], "--click"), ([], "expected engagements"), (["click", "share"], "")],
    ids=["two actions", "none", "a usual name"],
)
def test_an_unclear_action_is_asked_for(engaged: list[str], wanted: str) -> None:
    impression, engagement = make_log()
    write_lines("log.jsonl", [impression, *({**engagement, "action": name} for name in engaged)])
    if not wanted:
        run("shop", "--from", "log.jsonl")
        assert load_written_schema().online.click == "click"
        return
    with pytest.raises(ConfigError, match=wanted):
        run("shop", "--from", "log.jsonl")
    assert not Path("shop").exists()


def test_actions_with_any_name_become_labels() -> None:
    impression, engagement = make_log()
    actions = ["点击", "👍", "Add to cart", "add_to_cart"]
    write_lines("log.jsonl", [impression, *({**engagement, "action": name} for name in actions)])
    run("shop", "--from", "log.jsonl", "--click", "点击")
    labels = {label.action: label.name for label in load_written_schema().labels}
    assert list(labels) == actions and len(set(labels.values())) == 4


def test_two_csv_tables_are_understood() -> None:
    names = ("request_id", "time", "user_id", "item_id", "basket", "price", "category")
    with Path("shown.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                names,
                *((f"r{n // 2}", T0 + n // 2, "ann", f"i{n}", 7 + n // 2, n / 3, "hats") for n in range(6)),
            ]
        )
    Path("done.csv").write_text(f"request_id,time,user_id,item_id,action\nr0,{T0},ann,i1,click\n")
    output = run("shop", "--from", "shown.csv", "--engagements", "done.csv").output
    schema = load_written_schema()
    assert "basket" in {f.name for f in schema.ro} and "price" in {f.name for f in schema.nro}
    assert "replay csv" in output and "--engagements done.csv" in output


def test_objects_are_read_as_sequences_or_reported() -> None:
    history, place = {"item": [3], "time": [T0]}, {"city": "x", "zone": 2}
    shown = {"request_id": ["r"], "time": [T0], "item_id": ["a"], "user_id": [5]}
    pq.write_table(pa.table(shown | {"read": [history]}), "shown.parquet")
    pq.write_table(pa.table(shown | {"place": [place]}), "other.parquet")
    pq.write_table(pa.table(shown | {"action": ["click"]}), "done.parquet")
    run("shop", "--from", "shown.parquet", "--engagements", "done.parquet")
    assert {f.name: f.kind for f in (*load_written_schema().ro, *load_written_schema().nro)}[
        "read"
    ] == "sequence"
    write_lines("log.jsonl", make_log(place=place))
    for log in (("other.parquet", "--engagements", "done.parquet"), ("log.jsonl",)):
        with pytest.raises(ConfigError, match="'place' is an object with 'city'"):
            run("other", "--from", *log)


def test_the_printed_commands_read_tables_with_columns_that_nothing_uses() -> None:
    shown = {"request_id": ["r"] * 2, "time": [T0] * 2, "item_id": ["a", "b"], "price": [1.5, 2.5]}
    pq.write_table(pa.table(shown | {"note": pa.nulls(2)}), "shown.parquet")
    done = {"request_id": ["r"], "time": [T0], "item_id": ["a"], "action": ["click"], "price": [1.5]}
    pq.write_table(pa.table(done | {"campaign": ["x"]}), "done.parquet")
    output = run("shop", "--from", "shown.parquet", "--engagements", "done.parquet").output
    assert "'note' is empty" in output and "'campaign' of engagements is ignored" in output
    assert output.count("--ignore note campaign") == 3
    files = {"impressions": ("shown.parquet",), "engagements": ("done.parquet",)}
    options = parquet_log.Options(**files, ignore=("note", "campaign"))
    assert len(list(parquet_log.open(options, load_written_schema(), 0).events)) == 2


def make_flat_table(**more: list[Any]) -> dict[str, list[Any]]:
    return {
        "visitor": [1, 1, 2, 2],
        "shownAt": [T0 // 1000, T0 // 1000, T0 // 1000 + 5, T0 // 1000 + 5],
        "article": ["a", "b", "a", "c"],
        "Price": [1.5, 2.5, 1.5, 3.5],
        "clicked": [True, False, False, True],
        **more,
    }


def test_a_flat_table_gets_a_map_that_imports_it() -> None:
    pq.write_table(pa.table(make_flat_table()), "rows.parquet")
    output = run("shop", "--from", "rows.parquet").output
    assert "column 'article' is the item" in output and "import table" in output
    schema = load_written_schema()
    counts = import_table(["rows.parquet"], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    assert (counts.requests, counts.engagements, counts.skipped) == (2, 2, 0)


@pytest.mark.parametrize(
    ("factor", "unit"),
    [(1, "ms"), (0.001, "s"), (1000, "us"), (1_000_000, "ns")],
    ids=["ms", "s", "us", "ns"],
)
def test_the_unit_of_times_is_found(factor: float, unit: str) -> None:
    times = [(T0 + 123) * factor, (T0 + 123) * factor, (T0 + 1123) * factor, (T0 + 1123) * factor]
    pq.write_table(pa.table(make_flat_table(shownAt=times)), "rows.parquet")
    run("shop", "--from", "rows.parquet")
    schema = load_written_schema()
    import_table(["rows.parquet"], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    found = [json.loads(line) for line in Path("shop/log.jsonl").read_text().splitlines()]
    assert [line["time"] for line in found if line["type"] == "impression"] == [T0 + 123, T0 + 1123]


@pytest.mark.parametrize("digits", ["%Y%m%d%H%M", "%Y%m%d%H%M%S", "%Y%m%d%H%M%S000"])
def test_dates_in_digits_are_never_read_as_numbers_since_1970(digits: str) -> None:
    first = datetime.datetime(2024, 6, 1, 12)
    times = [(first + datetime.timedelta(hours=n)).strftime(digits) for n in range(40)]
    rows = [f"{time},u{n % 3},i{n},{n % 2}" for n, time in enumerate(times)]
    Path("rows.csv").write_text("\n".join(["ts,user_id,item_id,clicked", *rows]) + "\n")
    with pytest.raises(ConfigError, match=f"expected times such as.*{times[-1]}"):
        run("shop", "--from", "rows.csv")


def test_columns_of_other_types_are_read_or_reported() -> None:
    day = datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)
    more = {
        "price": [Decimal("1.50"), Decimal("2.50"), Decimal("1.50"), None],
        "paid": [Decimal("9.99"), None, None, Decimal("0.00")],
        "published": [day, day, None, day],
        "vector": [[0.5, 1.5]] * 4,
    }
    pq.write_table(pa.table(make_flat_table(clicked=[1, 0, 0, 0], **more)), "rows.parquet")
    with pytest.raises(ConfigError, match=r"'vector'.*--ignore"):
        run("shop", "--from", "rows.parquet", "--ignore", "Price")
    ignored = ("--ignore", "vector", "Price")
    output = run("shop", "--from", "rows.parquet", *ignored, "--click", "paid").output
    schema = load_written_schema()
    assert {f.name: f.kind for f in schema.nro}["price"] == "float" and schema.online.click == "paid"
    assert "'published' is a time" in output and "published" not in {f.name for f in schema.nro}
    counts = import_table(["rows.parquet"], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    assert (counts.requests, counts.engagements) == (2, 2)


def test_the_prior_of_a_log_with_few_negatives_is_valid() -> None:
    rows = {name: cells * 500 for name, cells in make_flat_table(clicked=[1] * 4).items()}
    rows["clicked"][0] = 0
    pq.write_table(pa.table(rows), "rows.parquet")
    run("shop", "--from", "rows.parquet")
    assert load_written_schema().labels[0].prior == 0.99


def test_columns_with_values_only_after_a_click_are_no_features() -> None:
    clicked = [n % 4 == 0 for n in range(200)]
    rows = {name: cells * 50 for name, cells in make_flat_table().items()} | {
        "clicked": clicked,
        "seconds": [n * was_clicked for n, was_clicked in enumerate(clicked)],
        "stars": [5 if was_clicked and n % 8 else None for n, was_clicked in enumerate(clicked)],
        "coupon": [1 if n in (0, 4) else None for n in range(200)],  # too few values to exclude chance
    }
    pq.write_table(pa.table(rows), "rows.parquet")
    output = run("shop", "--from", "rows.parquet").output
    assert {f.name for f in load_written_schema().nro} & {"seconds", "stars", "coupon", "price"} == {
        "coupon",
        "price",
    }
    assert "'seconds' has values only where a user acted" in output


def test_rows_of_actions_without_a_known_user_name_the_flag_for_the_user() -> None:
    events = {"event": ["view", "view", "purchase", "view"], "article": ["a", "b", "b", "c"]}
    rows = {**make_flat_table(), **events}
    del rows["clicked"]
    rows["besucher"] = rows.pop("visitor")
    pq.write_table(pa.table(rows), "rows.parquet")
    with pytest.raises(ConfigError, match=r"rows.parquet.*--user COLUMN.*besucher"):
        run("shop", "--from", "rows.parquet")
    rows["visitorid"] = rows.pop("besucher")  # as in the events of RetailRocket
    pq.write_table(pa.table(rows), "rows.parquet")
    assert "'visitorid' is the user" in run("shop", "--from", "rows.parquet").output


def test_a_column_that_is_above_0_in_every_row_is_reported() -> None:
    pq.write_table(pa.table(make_flat_table(clicked=[4.0, 5.0, 1.0, 2.0])), "rows.parquet")
    output = run("shop", "--from", "rows.parquet", "--click", "clicked").output
    assert "'clicked' is above 0" in output and "in every row" in output


def test_reviews_with_pictures_are_read_as_ratings() -> None:
    reviews = [
        {"reviewerID": f"A{n % 3}", "asin": f"B{n}", "overall": 1.0 + n % 5, "unixReviewTime": T0 // 1000 + n}
        | {"images": [{"large_image_url": "u"}, {"large_image_url": "v"}] if n % 4 == 0 else []}
        for n in range(20)
    ]
    write_lines("reviews.jsonl", reviews)
    output = run("shop", "--from", "reviews.jsonl").output
    assert "20 requests with 20 candidates" in output and "'overall' is 4 or more" in output
    assert "'reviewerID' is the user" in output


def test_a_column_with_values_only_in_action_rows_is_no_feature() -> None:
    events = {"event": ["view", "view", "purchase", "view"], "article": ["a", "b", "b", "c"]}
    rows = {**make_flat_table(visitor=[1, 1, 1, 2], **events), "revenue": [None, None, 9.5, None]}
    del rows["clicked"]
    pq.write_table(pa.table(rows), "rows.parquet")
    output = run("shop", "--from", "rows.parquet").output
    assert {f.name for f in (*load_written_schema().ro, *load_written_schema().nro)} & {
        "price",
        "revenue",
    } == {"price"}
    assert "'revenue' has values only in rows of actions" in output


def test_boolean_features_in_json_lines_are_refused() -> None:
    write_lines("log.jsonl", make_log(member=True))
    with pytest.raises(ConfigError, match=r"'member'.*write 1 and 0"):
        run("shop", "--from", "log.jsonl")


def test_a_time_column_of_two_tables_can_be_ignored() -> None:
    day = datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)
    shown = {"request_id": ["r"] * 2, "time": [T0] * 2, "item_id": ["a", "b"], "published": [day] * 2}
    pq.write_table(pa.table(shown), "shown.parquet")
    done = {"request_id": ["r"], "time": [T0], "item_id": ["a"], "action": ["click"]}
    pq.write_table(pa.table(done), "done.parquet")
    tables = ("shop", "--from", "shown.parquet", "--engagements", "done.parquet")
    with pytest.raises(ConfigError, match="--ignore published"):
        run(*tables)
    assert "--ignore published" in run(*tables, "--ignore", "published").output


def test_a_column_of_row_numbers_is_no_feature() -> None:
    columns = {"": [0, 1, 2, 3], **make_flat_table()}
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    Path("rows.csv").write_text("\n".join(rows) + "\n")
    assert "'column_1' has the numbers of the rows" in run("shop", "--from", "rows.csv").output
    assert "column_1" not in {f.name for f in load_written_schema().nro}


@pytest.mark.parametrize(
    ("slots", "is_position"), [([1, 2, 3], True), ([2, 0, 1], True), ([1, 1, 2], False), ([4, 5, 6], False)]
)
def test_a_column_that_numbers_each_list_is_the_position_and_no_feature(
    slots: list[int], is_position: bool
) -> None:
    """A position cannot be a feature, because it is the result of ranking: serving does not know it
    beforehand."""
    lines = ["visitor,shown_at,article,slot,clicked"]
    lines += [f"v{n},{T0 + n},a{slot},{slot},{slot % 2}" for n in range(4) for slot in slots]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    output = run("shop", "--from", "rows.csv").output
    assert ("column 'slot' is the position" in output) is is_position
    assert load_map("shop/map.toml", load_written_schema()).position == ("slot" if is_position else "")
    assert ("slot" in {f.name for f in load_written_schema().nro}) is not is_position


def test_a_log_without_users_has_the_history_of_its_sessions_or_none() -> None:
    lines = [{key: value for key, value in line.items() if key != "user_id"} for line in make_log()]
    write_lines("log.jsonl", lines)
    run("anonymous", "--from", "log.jsonl")
    assert not {"history", "history_len"} & {f.name for f in load_written_schema("anonymous").ro}
    later = [line | {"request_id": "r2", "time": T0 + 60_000, "session_id": 5} for line in lines]
    write_lines("log.jsonl", [line | {"session_id": 5} for line in lines] + later)
    run("sessions", "--from", "log.jsonl")
    schema = load_written_schema("sessions")
    assert {"history", "session_history_len"} <= {f.name for f in schema.ro}
    config = CheckConfig(schema="sessions/schema.toml", log=("log.jsonl",))
    assert check_command.check(config, Stop())["log"]["features"]["history"]["max"] == 1


@pytest.mark.parametrize(
    "names", ["session_id,time", "user_id,time", "user_id,request_id", "session_id,request_id"]
)
def test_lists_of_two_visitors_with_equal_times_or_ids_are_two_requests(names: str) -> None:
    owner, key = names.split(",")
    rows = [
        f"{T0 // 1000 + second},{who},{second},i{n},{who * 3},{n % 2}"
        for second in range(60)
        for who in (1, 2)
        for n in range(3)
    ]
    first = f"at,{owner},{key.replace('time', 'noise')},item,page_no,clicked"
    Path("rows.csv").write_text("\n".join([first, *rows]) + "\n")
    output = run("shop", "--from", "rows.csv").output
    schema = load_written_schema()
    counts = import_table(["rows.csv"], schema, load_map("shop/map.toml", schema), Path("log.jsonl"))
    assert "120 requests with 360 candidates" in output and counts.requests == 120
    assert "page_no" in {f.name for f in schema.ro}


@pytest.mark.parametrize("name", ["customer_uuid", "userHash", "viewer_id", "reader"])
def test_a_column_with_a_usual_name_of_users_is_the_user(name: str) -> None:
    Path("rows.csv").write_text(f"ts,{name},item,clicked\n1717200000,u7,i1,1\n1717200000,u7,i2,0\n")
    assert f"column {name!r} is the user" in run("shop", "--from", "rows.csv").output
    Path("rows.csv").write_text(
        f"ts,{name},user_id,item,clicked\n1,u7,5,i1,1\n1,u7,5,i2,0\n".replace("1,u7", f"{T0},u7")
    )
    assert "column 'user_id' is the user" in run("both", "--from", "rows.csv").output


@pytest.mark.parametrize("form", ["table", "lists", "lines"])
def test_of_large_files_only_the_first_rows_are_read(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_log, "MAX_CELLS", 2400)
    for name in ("a", "b"):
        lines: list[dict[str, Any]] = []
        for n in range(200):
            key = {"request_id": f"{name}{n}", "user_id": n % 7 + 1, "time": T0}
            shown = [{"item_id": f"i{n % 9 + k}", "price": 1.5 * k} for k in range(4)]
            if form == "table":
                lines += [{**key, **item, "clicked": k % 2} for k, item in enumerate(shown)]
            elif form == "lists":
                items = [item["item_id"] for item in shown]
                lines.append({**key, "item_ids": items, "clicked": items[:1]})
            else:
                lines.append({**key, "type": "impression", "candidates": shown})
                lines.append({**key, "type": "engagement", "item_id": "i1", "action": "click"})
        write_lines(f"{name}.jsonl", lines)
    output = run("shop", "--from", "a.jsonl", "b.jsonl").output
    [requests] = re.findall(r"([0-9]+) requests with", output)
    assert "only the first rows" in output and 40 <= int(requests) < 400


def test_a_flat_table_without_a_known_user_says_so() -> None:
    Path("rows.csv").write_text("ts,who,item,empty,clicked\n" + "1717200000,7,i1,,1\n1717200000,7,i2,,0\n")
    output = run("shop", "--from", "rows.csv").output
    assert "--user" in output and "column 'empty' is empty" in output
    assert "--user" not in run("other", "--from", "rows.csv", "--user", "who").output


@pytest.mark.parametrize("form", ["jsonl", "table"])
def test_lists_beyond_the_default_limits_raise_the_limits(form: str) -> None:
    items = [f"i{n}" for n in range(1500)]
    if form == "jsonl":
        impression, engagement = make_log(read={"item": list(range(2500)), "time": [T0] * 2500})
        write_lines(
            "log.jsonl", [{**impression, "candidates": {"item_id": items}}, {**engagement, "item_id": "i1"}]
        )
        run("shop", "--from", "log.jsonl")
        assert load_written_schema().limits.max_list >= 2500
        assert {f.name: f.max_len for f in load_written_schema().ro}["read"] == 2000
    else:
        many = {"visitor": ["v"] * 1500, "shownAt": [T0] * 1500, "article": items}
        pq.write_table(pa.table(many | {"clicked": [1] * 1500}), "rows.parquet")
        run("shop", "--from", "rows.parquet")
        assert load_written_schema().limits.max_list == 2000
    assert load_written_schema().limits.max_candidates >= 1500


def test_ids_that_never_occur_again_are_no_features() -> None:
    rows = [
        {"visitor": f"v{n % 7}", "shownAt": T0 + n, "article": f"a{slot}", "clicked": slot,
         "call": f"c{n}", "row_id": 2 * n + slot, "phrase": f"p{n % 99}"}
        for n in range(100)
        for slot in range(2)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    output = " ".join(run("shop", "--from", "rows.parquet").output.split())
    assert {f.name for f in (*load_written_schema().ro, *load_written_schema().nro)} & {
        "call",
        "row_id",
        "phrase",
    } == {"phrase"}
    assert "'call' has another id in every request" in output and "--request call" in output
    assert "'row_id' has another id in every row" in output


def test_ratings_of_the_last_century_are_imported() -> None:
    """MovieLens has ratings since 1996, with times in seconds."""
    rows = "".join(f"{n % 3},{n},{n % 5 + 1},{850_000_000 + 70 * n}\n" for n in range(40))
    Path("ratings.csv").write_text(f"userId,movieId,rating,timestamp\n{rows}")
    run("movies", "--from", "ratings.csv")
    schema = load_written_schema("movies")
    column_map = load_map("movies/map.toml", schema)
    counts = import_table(["ratings.csv"], schema, column_map, Path("movies/log.jsonl"))
    assert column_map.time_unit == "s" and (counts.requests, counts.engagements) == (40, 16)


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [("seen_at", [T0], {"seen_at": "time_ms"}), ("seen_at", [T0 // 1000], ""),
     ("author", [T0 // 1000], {"author": "ids"})],
)  # fmt: skip
def test_times_of_a_sequence_are_in_ms(name: str, values: list[int], wanted: dict[str, str] | str) -> None:
    write_lines("log.jsonl", make_log(read={"item": [3], name: values}))
    if wanted:
        run("shop", "--from", "log.jsonl")
        assert {f.name: f.columns for f in load_written_schema().ro}["read"] == wanted
    else:
        with pytest.raises(ConfigError, match=r"'read'.*ms since 1970 in 'seen_at'.* in s;"):
            run("shop", "--from", "log.jsonl")


def test_columns_named_like_fields_of_a_log_become_features() -> None:
    """A column `weight` (in kg) is not taken for the log's sampling weight, and an ignored column `history`
    is not read for the feature `history`."""
    more = {"weight": [1.5, 2.5, 3.5, 4.5], "surface": [60, 70, 80, 90], "item_id": [7, 8, 9, 10]}
    pq.write_table(pa.table(make_flat_table(**more, history=["old"] * 4)), "rows.parquet")
    run("shop", "--from", "rows.parquet", "--item", "article", "--ignore", "history")
    schema = load_written_schema()
    names = {f.name for f in (*schema.ro, *schema.nro)}
    assert {"weight_value", "surface_value", "item_id_value", "history"} <= names
    import_table(["rows.parquet"], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    lines = [json.loads(line) for line in Path("shop/log.jsonl").read_text().splitlines()]
    shown = [line for line in lines if line["type"] == "impression"]
    assert [line["candidates"]["item_id"] for line in shown] == [["a", "b"], ["a", "c"]]
    assert shown[0]["candidates"]["weight_value"] == [1.5, 2.5]
    assert not any("weight" in line or "history" in line.get("ro", ()) for line in shown)


def test_an_object_is_never_taken_for_an_action() -> None:
    shared = {"item": [3], "time": [T0]}
    pq.write_table(pa.table(make_flat_table(shared=[shared] * 4)), "rows.parquet")
    run("shop", "--from", "rows.parquet")
    assert [label.name for label in load_written_schema().labels] == ["clicked"]
    assert {f.name: f.kind for f in load_written_schema().ro}["shared"] == "sequence"


@pytest.mark.parametrize("name", ["user", "hour", "weekday"])
def test_a_candidate_column_may_be_named_like_a_field_of_counters(name: str) -> None:
    rows = {**make_flat_table(), name: ["x", "y", "y", "x"], "article": ["a", "b", "c", "d"]}
    pq.write_table(pa.table(rows), "rows.parquet")
    run("shop", "--from", "rows.parquet", "--user", "visitor", "--item", "article")
    assert not any(counter.name.startswith("user_") for counter in load_written_schema().counters)


def test_names_of_other_alphabets_become_names_of_the_schema() -> None:
    columns = {"Größe": [1.5, 2.5, 3.5, 4.5], "价格": [2.5, 3.5, 4.5, 5.5]}
    pq.write_table(pa.table(make_flat_table(**columns)), "rows.parquet")
    run("shop", "--from", "rows.parquet", "--ignore", "Price")
    schema = load_written_schema()
    names = load_map("shop/map.toml", schema).features
    assert names == {"grosse": "Größe", f"column_{len(make_flat_table()) + 2}": "价格"}
    import_table(["rows.parquet"], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"raw": [b"x"] * 4}, "'raw' .*got binary"),
        ({"took": [datetime.timedelta(seconds=n) for n in range(4)]}, "'took' .*got duration"),
        ({"vat": [[Decimal(n)] for n in range(4)]}, "'vat' .*got list"),
        ({"Price": [1.5, float("nan"), 2.5, 3.5], "article": [b"a"] * 4}, "'article' .*got binary"),
    ],
)
def test_a_column_that_cannot_be_imported_is_reported_by_init(column: dict[str, Any], message: str) -> None:
    pq.write_table(pa.table(make_flat_table(**column)), "rows.parquet")
    with pytest.raises(ConfigError, match=rf"{message}.*--ignore"):
        run("shop", "--from", "rows.parquet")
    assert not Path("shop").exists()


def test_lists_of_objects_are_read_as_candidates_or_reported() -> None:
    shown = [{"id": n, "clicked": n == 1} for n in range(3)]
    rows = [{"request_id": f"r{n}", "ts": T0 + n, "items": shown} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    assert "5 requests with 15 candidates" in run("shop", "--from", "rows.parquet").output
    schema = load_written_schema()
    counts = import_table(["rows.parquet"], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    assert (counts.requests, counts.engagements) == (5, 5)
    other = [{"slate" if key == "items" else key: value for key, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(other), "rows.parquet")
    with pytest.raises(ConfigError, match="rename it to 'candidates'"):
        run("other", "--from", "rows.parquet")


def test_names_that_collide_in_the_schema_are_reported_and_nothing_is_written() -> None:
    pq.write_table(pa.table(make_flat_table(price=[1.0] * 4)), "rows.parquet")
    with pytest.raises(ConfigError, match=r"'Price' and 'price' would both be .*--ignore"):
        run("shop", "--from", "rows.parquet")
    pq.write_table(pa.table(make_flat_table(Clicked=[1] * 4)), "rows.parquet")
    with pytest.raises(ConfigError, match="'clicked' and 'Clicked' would both be"):
        run("shop", "--from", "rows.parquet")
    assert not Path("shop").exists()
    pq.write_table(
        pa.table(make_flat_table(**{"p" * 150: [0.5, 1.5, 2.5, 3.5], "user": [0.5] * 4})), "rows.parquet"
    )
    run("shop", "--from", "rows.parquet", "--user", "visitor")
    schema = load_written_schema()
    assert "p" * 64 in {f.name for f in schema.nro}
    assert {f.table for f in (*schema.ro, *schema.nro)} - {""} == {t.name for t in schema.tables}


def format_rows(rows: list[dict[str, Any]], form: str) -> str:
    """Format rows as JSON lines or as a tab-separated table."""
    if form == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    names = list(rows[0])
    return (
        "\n".join(["\t".join(names), *("\t".join(str(row[name]) for name in names) for row in rows)]) + "\n"
    )


@pytest.mark.parametrize(
    ("form", "columns", "wanted"),
    [
        ("tsv", {"clicked": [1, 0, 0, 1]}, (2, 2, "clicked")),
        ("jsonl", {"clicked": [True, False, False, True]}, (2, 2, "clicked")),
        ("tsv", {"shownAt": ["13/04/2024 10:00", "13/04/2024 10:00", "14/04/2024 9:00", "14/04/2024 9:00"],
                 "bought": ["yes", "no", "no", "no"]}, (2, 1, "bought")),
        ("tsv", {"rating": [4.5, 5.0, 1.0, 4.0]}, (2, 3, "rating")),
        ("tsv", {"event": ["view", "view", "purchase", "view"], "article": ["a", "b", "b", "c"],
                 "visitor": [1, 1, 1, 2]}, (2, 1, "purchase")),
    ],
    ids=["flags", "JSON lines", "days first", "a rating", "rows of actions"],
)  # fmt: skip
def test_a_text_table_gets_a_map_that_imports_it(
    form: str, columns: dict[str, list[Any]], wanted: tuple[int, int, str]
) -> None:
    table = {name: cells for name, cells in make_flat_table().items() if name != "clicked"} | columns
    path = Path(f"rows.{form}")
    path.write_text(
        format_rows([dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)], form)
    )
    output = run("shop", "--from", str(path)).output
    schema = load_written_schema()
    counts = import_table([str(path)], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    assert (counts.requests, counts.engagements, schema.labels[0].action) == wanted
    assert counts.skipped == 0 and "import table" in output


@pytest.mark.parametrize(
    ("columns", "flags", "word"),
    [
        (make_flat_table(product=["p", "q", "r", "s"]), (), "--item"),
        ({k: v for k, v in make_flat_table().items() if k != "article"}, (), "--item"),
        (make_flat_table(time=[T0] * 4, shown_at=[T0] * 4), ("--time", "tine"), "'time'"),
        ({k: v for k, v in make_flat_table().items() if k != "clicked"}, (), "--click"),
        (
            {**make_flat_table(clicked=[None] * 4), "event": ["look", "look", "buy", "look"]},
            (),
            "'event', which has buy, look",
        ),
        (make_flat_table(shownAt=[str(T0), "10:30", "10:30", "soon"]), (), "'shownAt'.* as '10:30'"),
        (make_flat_table(shownAt=[T0, T0, T0 // 1000, T0 // 1000]), ("--time", "shownAt"), "'shownAt'"),
        (make_flat_table(), ("--ignore", "price"), "no column 'price'; did you mean 'Price'"),
    ],
    ids=[
        "two items",
        "no item",
        "a misspelled column",
        "no action",
        "events without shown items",
        "no times",
        "times in two units",
        "a misspelled column to leave out, which would be a feature",
    ],
)
def test_an_unclear_flat_table_is_asked_about(
    columns: dict[str, Any], flags: tuple[str, ...], word: str
) -> None:
    pq.write_table(pa.table(columns), "rows.parquet")
    with pytest.raises(ConfigError, match=word):
        run("shop", "--from", "rows.parquet", *flags)


@pytest.mark.parametrize(
    "args",
    [
        ("shop", "--from", "absent.jsonl"),
        ("shop", "--from", "log.xlsx"),
        ("shop", "--item", "x"),
        ("shop", "--requests", "3"),
        ("a b",),
    ],
)
def test_wrong_input_is_reported_in_one_sentence(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        run(*args)
    assert "\n" not in str(error.value)


def write_visits(times: pa.Array, **more: Any) -> None:
    columns = {"user": ["a", "a", "b"], "item": [1, 2, 3], "time": times, "clicked": [1, 0, 1], **more}
    pq.write_table(pa.table(columns), "visits.parquet")


def test_a_damaged_parquet_file_is_refused_in_one_sentence() -> None:
    write_visits(pa.array([T0] * 3), text=[f"{n}" * 999 for n in range(3)])
    data = bytearray(Path("visits.parquet").read_bytes())
    data[len(data) // 8 : len(data) // 4] = bytes(len(data) // 4 - len(data) // 8)
    Path("visits.parquet").write_bytes(data)
    with pytest.raises(ConfigError, match=r"visits\.parquet: expected a complete"):
        run("shop", "--from", "visits.parquet")


def test_two_parquet_columns_of_one_name_are_refused() -> None:
    write_visits(pa.array([T0] * 3), price=[1.5, 2.5, 3.5], cost=[1.5, 2.5, 3.5])
    table = pq.read_table("visits.parquet")
    pq.write_table(table.rename_columns([*table.column_names[:-1], "price"]), "visits.parquet")
    with pytest.raises(ConfigError, match="two columns are named 'price'"):
        run("shop", "--from", "visits.parquet")


def test_timestamps_are_read_whatever_their_unit_and_zone_or_refused() -> None:
    write_visits(pa.array([T0 * 10**6 + 1] * 3, pa.timestamp("ns", "Nowhere/Unknown")))
    run("shop", "--from", "visits.parquet")
    write_visits(pa.array([T0 * 1000] * 3, pa.timestamp("ms")))
    with pytest.raises(ConfigError, match=r"column 'time'.* before the year 10000"):
        run("other", "--from", "visits.parquet")
    write_visits(pa.array([T0] * 3), seen=pa.array([T0 * 1000] * 3, pa.timestamp("ms")))
    with pytest.raises(ConfigError, match=r"column 'seen'.* before the year 10000.* --ignore"):
        run("other", "--from", "visits.parquet")
    run("other", "--from", "visits.parquet", "--ignore", "seen")


@pytest.mark.parametrize("kind", [pa.timestamp("ms", "Nowhere/Unknown"), pa.timestamp("ns")])
def test_timestamps_in_lists_and_objects_are_read_whatever_their_unit_and_zone(kind: pa.DataType) -> None:
    lists = pa.array([[1]] * 3, pa.list_(kind))
    read = pa.StructArray.from_arrays([pa.array([[7]] * 3), lists], ["item", "time"])
    write_visits(pa.array([T0] * 3), read=read)
    run("shop", "--from", "visits.parquet")
    assert 'columns = { time = "time_ms" }' in Path("shop/schema.toml").read_text()
    write_visits(pa.array([T0] * 3), seen=lists)
    with pytest.raises(ConfigError, match=r"column 'seen' .* convert the column"):
        run("other", "--from", "visits.parquet")


@pytest.mark.parametrize("flags", [("--ignore", "price"), ("--item", "item_id")])
def test_options_about_columns_are_refused_for_lines_with_fixed_names(flags: tuple[str, str]) -> None:
    write_lines("log.jsonl", make_log())
    with pytest.raises(ConfigError, match=f"{flags[0]}: expected a table"):
        run("shop", "--from", "log.jsonl", *flags)


def test_a_counter_of_the_user_may_stand_beside_a_feature_named_user() -> None:
    schema = schema_from_dict(
        {
            "tables": {"user": {"dim": 4}},
            "ro": [{"name": "user", "kind": "ids", "table": "user"}],
            "nro": [{"name": "price"}],
            "counter": [{"name": "orders", "entity": "user", "event": "order"}],
            "label": [{"name": "click", "action": "click"}],
        }
    )
    assert schema.counters[0].entity == ("user",)


def request_rows(**more: Any) -> list[dict[str, Any]]:
    """A row per request: the shown items and their prices in lists, and the user's history."""
    return [
        {
            "user_id": n % 3,
            "time": T0 + n,
            "items": ["a", "b", "c"][: 2 + n % 2],
            "prices": [1.5, 2.0, None][: 2 + n % 2],
            "history": ["c"] * (n % 4),
            **{name: cells[n % 2] for name, cells in more.items()},
        }
        for n in range(8)
    ]


def write_rows(rows: list[dict[str, Any]], name: str) -> None:
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), name)
    elif name.endswith(".jsonl"):
        write_lines(name, rows)
    else:
        with open(name, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(
                {key: json.dumps(cell) if isinstance(cell, list) else cell for key, cell in row.items()}
                for row in rows
            )


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.csv"])
@pytest.mark.parametrize(
    ("column", "cells"),
    [("clicked_items", [["b"], ["a", "c"]]), ("clicked", [[0, 1], [1, 0, 1]]), ("clicked_item", ["b", None])],
)
def test_a_table_with_a_row_per_request_is_imported(name: str, column: str, cells: list[Any]) -> None:
    write_rows(request_rows(**{column: cells}), name)
    output = run("shop", "--from", name).output
    assert "a row is a request, with an entry for each shown item in 'items', 'prices'" in output
    schema = load_written_schema()
    sides = {f.name: f.kind for f in schema.nro}, {f.name: f.kind for f in schema.ro}
    assert sides[0]["prices"] == "float" and sides[1]["history"] in ("ids", "sequence")
    counts = import_table([name], schema, load_map("shop/map.toml", schema), Path("shop/log.jsonl"))
    lines = [json.loads(line) for line in Path("shop/log.jsonl").read_text().splitlines()]
    shown = [line["candidates"]["item_id"] for line in lines if line["type"] == "impression"]
    assert shown == [row["items"] for row in request_rows()]
    clicks = [(line["time"] - T0 - 1000, line["item_id"]) for line in lines if line["type"] == "engagement"]
    both = [*((n, "b") for n in (0, 2, 4, 6)), *((n, item) for n in (1, 3, 5, 7) for item in ("a", "c"))]
    wanted = both[:4] if column == "clicked_item" else sorted(both)
    assert sorted(clicks) == wanted and counts.requests == 8


def test_the_form_of_mind_is_imported() -> None:
    lines = ["impression_id\tuser_id\ttime\thistory\timpressions"]
    for n in range(20):
        lines.append(f"{n}\tU{n % 3}\t11/{n + 10}/2019 9:05:58 PM\tN1 N2\tN{n}-0 N{n + 1}-1")
    Path("behaviors.tsv").write_text("\n".join(lines))
    run("news", "--from", "behaviors.tsv")
    schema = load_written_schema("news")
    assert {f.name: f.kind for f in schema.ro}["history"] == "ids" and schema.online.click == "clicked"
    column_map = load_map("news/map.toml", schema)
    counts = import_table(["behaviors.tsv"], schema, column_map, Path("news/log.jsonl"))
    assert (counts.requests, counts.engagements, counts.rows) == (20, 20, 40)


def test_lists_of_other_values_beside_the_shown_items_are_read_or_named() -> None:
    """Decimals are numbers. Objects and vectors are no lists of items, whatever the name of the column."""
    rows = request_rows(clicked=[[0, 1], [1, 0, 1]])
    for row in rows:
        row["prices"] = [Decimal(f"{n}.50") for n in range(len(row["items"]))]
        row["opened"] = {"at": [1]}
        row["liked"] = [{"item": "a", "seconds": 3}]
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    run("shop", "--from", "rows.parquet", "--ignore", "opened", "liked")
    assert {f.name: f.kind for f in load_written_schema().nro}["prices"] == "float"
    with pytest.raises(ConfigError, match="--ignore"):
        run("other", "--from", "rows.parquet", "--ignore", "opened")


def test_lists_beside_an_item_are_its_features() -> None:
    rows = make_flat_table(items=[["a", "b"], ["c"], [], ["a"]])
    pq.write_table(pa.table(rows), "rows.parquet")
    run("shop", "--from", "rows.parquet")
    assert {f.name: f.kind for f in load_written_schema().nro}["items"] == "ids"
    assert "lists" not in Path("shop/map.toml").read_text()


def test_two_lists_of_shown_items_are_asked_about() -> None:
    write_lines("rows.jsonl", request_rows(item_ids=[["b"], ["a", "c"]], clicked=[[0, 1], [1, 0, 1]]))
    with pytest.raises(ConfigError, match=r"'items' and 'item_ids' .* --item COLUMN"):
        run("shop", "--from", "rows.jsonl")
    run("shop", "--from", "rows.jsonl", "--item", "items")
    assert 'item = "items"' in Path("shop/map.toml").read_text()
