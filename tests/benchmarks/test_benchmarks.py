"""Smoke tests of all benchmarks: each subject (an implementation under measurement) runs once at a small
size."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import main as benchmark_main
from benchmarks.common.dataset_paths import EBNERD, absent
from benchmarks.harness import machine
from benchmarks.harness.benchmark import Subject
from benchmarks.harness.subject_process import ROOT, PeerUnavailable, SubjectError, interpreter_for
from benchmarks.harness.subject_runner import Slice, SubjectRunner
from benchmarks.logs import KEYS
from benchmarks.main import benchmarks_by_name, find_benchmark, with_before
from benchmarks.recd import STEPS
from benchmarks.roo_vs_expanded import ARCHITECTURES, FORMS
from benchmarks.warehouse_bytes import WAYS as WAYS_AT_REST
from benchmarks.warehouse_read import planned
from roostream.errors import ConfigError

SMALL_CASES: dict[str, list[tuple[str, list[Any]]]] = {
    "train_vs_torchrec": [(f, [4, 3]) for f in ("our_loop", "our_batches", "torchrec_batches")],
    "hstu_attention": [
        ("attention", [way, backward, "float32", "cpu", [3, 20, 2, 2, 3]])
        for way, backward in (("reference", False), ("reference", True), ("causal", False), ("causal", True))
    ],
    "joiner_core": [
        *(("joined", [5, users]) for users in (2, 0)),
        *((f, [5, 2]) for f in ("read_and_joined", "parsed")),
        ("one_event", [3, 2]),
        ("read_one", []),
    ],
    "commit": [
        ("of_a_shard", [1000]),
        ("synced_of_a_shard", [1000]),
        ("sent", [1000]),
        ("fetched", [1000]),
        ("same_bytes", [1000, "put"]),
        ("same_bytes", [1000, "get"]),
    ],
    "restore": [(f, [1000]) for f in ("from_home", "from_store", "from_link", "from_disk")],
    "archive": [
        ("archived", [20]),
        ("written", [20]),
        *(("sealed", [64, 8, merge_bytes]) for merge_bytes in (1 << 27, 1 << 12)),
        ("sorted_by_arrow", [64, 8]),
    ],
    "pipeline": [("steps", [4, 3, 2, 1]), ("dense", [4, 3, 2]), ("sparse", [4, 3])],
    "placement": [
        *((f, [5, 2, 0]) for f in ("planned", "sorted_alone")),
        ("loaded", [5, 4, "row hash", 0]),
        *((f, [0]) for f in ("expected_unique", "sampled_unique")),
        ("profiled", [4]),
        *((f, [8, 40]) for f in ("profiled_unique", "counted_all")),
    ],
    "initial_torchrec": [
        ("exchanged", [kind, [2, 50, 4, 3, 2, 2, 1.0], 2])
        for kind in ("rows", "shards", "expanded", "tables", "planner", "profiled", "plan")
    ],
    "placement_switch": [("move_rows", [200, 2, 3]), ("write_file", [200, 16])],
    "decode": [(f, [2, 3]) for f in ("ours", "protobuf", "memcpy")],
    "common.rpc_ours": [
        ("send", [4096]),
        ("receive", [4096]),
        ("small", []),
        ("send", [4096, True]),
        ("receive", [4096, True]),
        ("small", [True]),
    ],
    "common.rpc_socket": [("send", [4096]), ("receive", [4096]), ("small", [])],
    "quality_early": [("learned", [log, 30, 0]) for log in ("shop", "news")],
    "selection": [("rotations", [{}, 0, 1, 200, {"normalize_rows": True}])],
    "serving_request": [
        ("endpoint", [3]),
        ("endpoint", [3, "protobuf"]),
        *(
            ("stage", [name, 3])
            for name in (
                "whole",
                "parse",
                "parse_and_encode",
                "to_batch",
                "look_up",
                "gather",
                "forward",
                "modules",
            )
        ),
    ],
    "serving_batch": [("once", [3]), ("repeated", [3])],
    "serving_overload": [("offered", [1.0, 0.3, 2])],
    "serving_e2e": [
        ("under_load", [kind, form, 0.3, 0.5, 3])
        for kind, form in (("ours", "json"), ("ours", "protobuf"), ("fastapi", "json"), ("litserve", "json"))
    ],
    "freshness": [("committed", []), ("loaded", [])],
    "retrieve": [
        *(("search", [how, 200]) for how in ("exact", "sorted", "products")),
        *(("kept", [what, 120]) for what in ("vectors", "look", "tower")),
        *(("asked", [what, 120]) for what in ("retrieve", "recommend", "rank", "tower")),
    ],
    "serving_swap": [("under_load", [True, 0.2, 0.3, 2])],
    "workers": [("trained", [1, 4, 3, 0.1]), ("trained", [2, 4, 3, 0.1]), ("summed", [2, 4, 3, 0.1])],
    "train_step": [
        *(
            ("stage", [name, 4, 3])
            for name in ("whole", "decode", "look_up", "pull", "to_tensors", "adam", "push")
        ),
        *(("on_device", [kind, 3, 9, {"device": "cpu"}]) for kind in ("ranker", "hstu", "two_tower")),
        *(
            ("ebnerd_stage", [name, 4])
            for name in ("whole", "forward_backward", "predict", "count", "products")
        ),
    ],
    "roo_vs_expanded": [
        *(("trained", ["early", form, 3, 6, 2]) for form in FORMS),
        *(("trained", [architecture, "requests", 3, 6, 2]) for architecture in ARCHITECTURES),
        *(("hstu_layer", [shared, 9, 3, 8]) for shared in (True, False)),
    ],
    "expand": [
        ("trained", [kind, way, 6, 3]) for kind in ("dlrm", "dcn", "ranker") for way in ("off", "impressions")
    ],
    "train_warehouse": [("from_files", [60]), ("from_files", [60, 16]), ("read_from_files", [60])],
    "readers": [
        *(("read", [readers, 4, 600]) for readers in (0, 2)),
        *(("starved", [most, 0.44, 2000.0, [0.2, 0.3], 4, 600]) for most in (0, 2)),
    ],
    "ps_pull_push": [
        ("pull", ["here", 2]),
        ("push", ["here", 2]),
        ("pull", ["there", 2]),
        ("push", ["secured", 2]),
        ("gather_numpy", [2]),
    ],
}
CASES_ON_PUBLIC_LOGS: dict[str, list[tuple[str, list[Any]]]] = {
    "recd": [("climbed", ["late", step, 3, 9, 300]) for step in STEPS],
    "logs": [("compressed", [key, 3, 9, 4]) for key in KEYS],
    "deferral": [("in_time_order", [{}, 0, 9])],
    "warehouse_bytes": [
        *(("written", ["EB-NeRD", 9, *how, 3]) for _, how in WAYS_AT_REST),
        ("on_the_wire", ["EB-NeRD", 9, 3]),
    ],
    "session_replay": [("read_again", [slower, share, 3, 9]) for slower, share in ((0.0, 0.3), (0.03, 0.1))],
    "warehouse_read": [
        *(
            ("read", ["EB-NeRD", 9, rows, "user", share, 3])
            for rows in ("requests", "impressions")
            for share in (1.0, 0.3, 0.1)
        ),
        ("decoded", ["EB-NeRD", 9, 3]),
        *(("flattened", [how, 20, 50]) for how in ("columns", "map")),
        *(("planned", [order, 0.08, 1.5]) for order in ("hash", "hit rate", "ours")),
    ],
}
CASES_ON_A_STACK: dict[str, list[tuple[str, list[Any]]]] = {
    "commit": [("commits", [1000, 1, True]), ("commits", [1000, 1, False]), ("synced", [1000])],
    "recovery": [
        ("recovery", ["worker", 1, 2000]),
        ("recovery", ["shard-0", 1, 2000]),
        ("recovery", ["controller", 1, 2000]),
        ("imports", [2000]),
    ],
    "freshness/engaged": [("engaged", [1000, 4000])],
    "recovery/goodput": [("goodput", [8.0, "worker", 2000]), ("goodput", [3.0, "", 2000])],
    "train_warehouse": [("from_kafka", [2000])],
    "train_warehouse/read": [("read_from_kafka", [2000])],
    "serving_live": [("under_load", [kind, "json", 2, 0.0]) for kind in ("live", "fastapi")],
    "handover": [("handed_over", [400]), ("restarted", [400]), ("committed", [400])],
    "recovery/preempted": [
        ("preempted", [5.0, 1, 2000]),
        ("preempted", [30.0, 1, 2000]),
        ("committed", [1, 2000]),
    ],
}
STARTS_PROGRAMS = {
    *("serving_e2e", "freshness", "serving_request", "serving_overload", "serving_swap"),
    *("initial_torchrec", "workers", "readers", "ps_pull_push"),
}
# The figures of these benchmarks are differences on the same requests, so their rows need no peer or limit.
COMPARES_ITSELF = {"quality-early", "quality-trees"}
# The first needs another Python environment; the second imports torch's compiler, which takes long.
NOT_RUN_HERE = {"common.rpc_grpc", "adagrad_torch"}


def take_turns(module: str, cases: list[tuple[str, list[Any]]]) -> list[Slice]:
    """Open the subjects of all `cases` and measure one turn of each."""
    runner = SubjectRunner()
    try:
        numbers = [runner.open(f"benchmarks.{module}:{function}", args, 0.0) for function, args in cases]
        return [runner.slice(number) for number in numbers]
    finally:
        runner.end()


@pytest.mark.timeout(400)  # peers of several processes start slowly on a busy machine
@pytest.mark.parametrize("module", [module for module in SMALL_CASES if module not in STARTS_PROGRAMS])
def test_every_subject_of_a_benchmark_runs(module: str) -> None:
    """All subjects of a benchmark are opened together, because the process collects garbage at every
    opening."""
    for case, turn in zip(SMALL_CASES[module], take_turns(module, SMALL_CASES[module]), strict=True):
        assert turn.units > 0, case


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("module", "case"),
    [(m, case) for m in sorted(STARTS_PROGRAMS & {*SMALL_CASES}) for case in SMALL_CASES[m]],
)
def test_a_subject_that_starts_programs_runs(module: str, case: tuple[str, list[Any]]) -> None:
    assert take_turns(module, [case])[0].units > 0


@pytest.mark.slow
@pytest.mark.skipif(bool(absent(EBNERD)), reason=absent(EBNERD))
def test_subjects_on_a_public_log_run() -> None:
    for module, cases in CASES_ON_PUBLIC_LOGS.items():
        for case in cases:
            (turn,) = take_turns(module, [case])
            assert turn.units > 0 and all(figure > 0 for figure in turn.figures.values()), case


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES_ON_A_STACK)
def test_subjects_on_a_running_stack_lose_nothing(name: str) -> None:
    """No event is lost or trained twice. The subjects of one entry share a stack."""
    for turn in take_turns(name.partition("/")[0], CASES_ON_A_STACK[name]):
        figures = turn.figures
        assert turn.units > 0
        assert figures.get("lost", 0) == figures.get("trained twice", 0) == 0, figures
        assert figures.get("committed %", 100) == figures.get("exit code 0 %", 100) == 100, figures


def test_feature_order_by_popularity_needs_fewer_reads() -> None:
    """The factor 2.4 of docs/decisions/0060, for a log in which a few features get most of the reads."""
    found = {}
    for order in ("ours", "hit rate", "hash"):
        with planned(order, 0.08, 1.5) as work:
            figures = work.figures()
        assert figures["bytes read of those needed"] <= 1.08
        found[order] = figures["reads a row group"]
    assert found["hash"] / found["ours"] >= 2.4 and found["hit rate"] / found["ours"] >= 1.1


def subjects() -> list[Subject]:
    return [subject for q in benchmarks_by_name().values() for row in q.rows for subject in row.subjects]


def test_every_subject_is_tested() -> None:
    tested = {
        f"{module.partition('/')[0]}:{function}"
        for table in (SMALL_CASES, CASES_ON_PUBLIC_LOGS, CASES_ON_A_STACK)
        for module, cases in table.items()
        for function, _ in cases
    }
    used = {s.setup.removeprefix("benchmarks.") for s in subjects()}
    assert {name for name in used - tested if not NOT_RUN_HERE & set(name.split(":"))} == set()


def test_every_row_has_a_peer_or_a_limit_and_plain_arguments() -> None:
    for benchmark in benchmarks_by_name().values():
        for row in benchmark.rows:
            is_compared = {"peer", "limit"} & {s.role for s in row.subjects}
            assert is_compared or benchmark.name in COMPARES_ITSELF, row.name
            assert row.subjects[0].role == "ours"
            assert len({s.name for s in row.subjects}) == len(row.subjects)
    assert json.dumps([s.arguments for s in subjects()])


def test_slipstream_is_compared_with_random_dropping() -> None:
    """A subject that skips stale samples with Slipstream has a peer with the same model that drops samples at
    random. The peer gets the Slipstream settings, so that it drops the same share.
    """
    num_found = 0
    for row in (row for benchmark in benchmarks_by_name().values() for row in benchmark.rows):
        for subject in row.subjects:
            if not _skips_stale(subject.arguments[:1]):
                continue
            num_found += 1
            settings, *sizes = subject.arguments
            controls = [s for s in row.subjects if s.arguments[1:] == (*sizes, settings)]
            assert [s.arguments[0]["selection"]["policy"] for s in controls] == ["random"], (
                row.name,
                subject.name,
            )
            assert controls[0].role == "peer"
    assert num_found >= 2, "one with LayerNorm on both sides, and one without"


def _skips_stale(arguments: Any) -> bool:
    return "slipstream" in json.dumps(arguments, default=str)


def test_against_adds_another_commit_after_each_of_our_subjects() -> None:
    row = with_before(find_benchmark("decode"), "abc").rows[0]
    assert [(s.role, s.environment) for s in row.subjects][:2] == [("ours", ""), ("before", "commit:abc")]


def test_a_subject_that_was_before_follows_the_one_it_is_compared_with() -> None:
    for benchmark in benchmarks_by_name().values():
        for row in benchmark.rows:
            for now, before in itertools.pairwise(row.subjects):
                assert before.role != "before" or now.role in ("ours", "stage"), (benchmark.name, row.name)


def test_wrong_options_end_a_benchmark_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_main, "measure", lambda *_, **__: pytest.fail("it measured"))
    with pytest.raises(ConfigError, match="--against: commit no-such-commit is not in this repository"):
        benchmark_main.main("decode", against="no-such-commit")
    for wrong in (tmp_path, tmp_path / "absent" / "decode.json"):
        with pytest.raises(ConfigError, match="expected a"):
            benchmark_main.main("decode", wrong)


def test_results_before_a_failure_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, **_: object) -> dict[str, Any]:
        if name == "decode":
            raise SubjectError("it failed")
        return {"question": name, "rows": []}

    monkeypatch.setattr(benchmark_main, "run", run)
    with pytest.raises(SubjectError):
        benchmark_main.main("all", tmp_path / "all.json")
    kept = [result["question"] for result in json.loads((tmp_path / "all.json").read_text())]
    assert kept == [name for name in benchmark_main.names() if name < "decode"]


def test_an_unknown_benchmark_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'decode'"):
        find_benchmark("decod")


def test_unavailable_peers_give_a_reason() -> None:
    with pytest.raises(PeerUnavailable, match=r"environments/nobody\.txt is not there"):
        interpreter_for("nobody")
    with pytest.raises(PeerUnavailable, match="is not in this repository"):
        interpreter_for("commit:no-such-commit")
    with pytest.raises(PeerUnavailable, match="expected a commit"):
        interpreter_for("commit:--help")


def test_the_environments_of_peers_are_pinned_and_hashed() -> None:
    for path in (ROOT / "benchmarks" / "environments").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line or line.strip().startswith("--hash=sha256:") for line in lines), path.name
        assert "http" not in path.read_text()


def test_the_machine_description_has_no_names() -> None:
    here = machine.machine()
    assert here["cores"] >= 1 and here["memory_gib"] > 0 and isinstance(here["busy"], bool)
    assert set(here) == {"cpu", "cores", "memory_gib", "system", "load_before", "busy"}
