"""Statistics of interleaved lists: engagements are credited to the version that placed the item, and each
request has a winner."""

from __future__ import annotations

import json

from roostream.schema.ids import key_bytes
from serving.feature_log.format import LogRecord
from serving.http.engagements import EngagementParser
from serving.ordering import OURS, RIVAL
from serving.versions.interleaving_stats import MAX_PAIRS, InterleavingStats, Pair
from tests.serving.serving_cases import NOW_MS, SCHEMA

PAIR = Pair("1-2", "1-1")


def engagements(
    item: int | str, *, request_id: str = "r-1", action: str = "click", user: int = 17
) -> list[LogRecord]:
    body = {"request_id": request_id, "user_id": user, "item_id": item, "action": action}
    return EngagementParser(SCHEMA).parse(json.dumps(body).encode(), NOW_MS).records


def record_draft(
    interleaving_stats: InterleavingStats,
    request_id: str = "r-1",
    pair: Pair = PAIR,
    items: tuple[int, ...] = (1, 2, -3),
) -> None:
    interleaving_stats.record_list(
        key_bytes(17, 0, request_id), request_id, pair, items, [OURS, RIVAL, RIVAL]
    )


def test_an_engagement_is_credited_to_the_team_of_its_item() -> None:
    interleaving_stats = InterleavingStats("click")
    record_draft(interleaving_stats)
    interleaving_stats.record_engagements(engagements(1))
    assert interleaving_stats.outcomes() == {"served": 1, "rival": 0, "tie": 0}
    interleaving_stats.record_engagements(engagements(2))
    assert interleaving_stats.outcomes() == {"served": 0, "rival": 0, "tie": 1}
    interleaving_stats.record_engagements(engagements(-3))
    assert (
        interleaving_stats.outcomes() == {"served": 0, "rival": 1, "tie": 0}
        and interleaving_stats.num_engaged == 3
    )


def test_an_item_counts_once() -> None:
    interleaving_stats = InterleavingStats("click")
    record_draft(interleaving_stats)
    interleaving_stats.record_engagements([*engagements(1), *engagements(1)])
    assert interleaving_stats.num_engaged == 1


def test_other_actions_requests_users_and_items_are_ignored() -> None:
    interleaving_stats = InterleavingStats("click")
    interleaving_stats.record_engagements(engagements(1))
    record_draft(interleaving_stats)
    for others in (
        engagements(1, action="read"),
        engagements(1, request_id="r-2"),
        engagements(1, user=3),
        engagements(9),
    ):
        interleaving_stats.record_engagements(others)
    assert interleaving_stats.num_engaged == 0 and interleaving_stats.outcomes_by_pair() == {}


def test_a_later_page_joins_its_request_and_a_repeat_changes_nothing() -> None:
    interleaving_stats = InterleavingStats("click")
    record_draft(interleaving_stats)
    record_draft(interleaving_stats)
    interleaving_stats.record_list(key_bytes(17, 0, "r-1"), "r-1", PAIR, (7, 1), [RIVAL, RIVAL])
    interleaving_stats.record_engagements([*engagements(7), *engagements(1)])
    assert interleaving_stats.num_lists == 1 and interleaving_stats.outcomes()["tie"] == 1


def test_the_oldest_request_is_dropped_at_the_memory_bound() -> None:
    interleaving_stats = InterleavingStats("click", max_candidates=7)
    for number in range(3):
        record_draft(interleaving_stats, f"r-{number}")
    for number in range(3):
        interleaving_stats.record_engagements(engagements(1, request_id=f"r-{number}"))
    assert interleaving_stats.num_engaged == 2


def test_a_request_counts_for_its_newest_pair() -> None:
    interleaving_stats = InterleavingStats("click", max_candidates=4)
    record_draft(interleaving_stats)
    record_draft(interleaving_stats, pair=Pair("1-3", "1-2"))
    interleaving_stats.record_engagements(engagements(2))
    assert interleaving_stats.outcomes_by_pair() == {Pair("1-3", "1-2"): {"served": 0, "rival": 1, "tie": 0}}


def test_only_the_newest_pairs_are_kept() -> None:
    interleaving_stats = InterleavingStats("click")
    for number in range(MAX_PAIRS + 5):
        record_draft(interleaving_stats, f"r-{number}", Pair(f"1-{number + 1}", f"1-{number}"))
        interleaving_stats.record_engagements(engagements(1, request_id=f"r-{number}"))
    assert (
        len(interleaving_stats.outcomes_by_pair()) == MAX_PAIRS
        and interleaving_stats.outcomes()["served"] == MAX_PAIRS
    )
