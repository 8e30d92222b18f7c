"""What operators are told of versions, and what they can change; a refusal changes nothing."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
from serving_cases import SCHEMA
from serving_fakes import FakeRows
from starlette.testclient import TestClient

from roostream.runtime.clock import FakeClock
from roostream.schema.ids import key_bytes
from serving.admin.admin_server import AdminInterface, AdminToken
from serving.admin.admin_service import AdminService
from serving.http.engagements import EngagementParser
from serving.scorer import Version
from serving.versions.idle_gate import IdleGate
from serving.versions.interleaving_stats import InterleavingStats, Pair
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.recent_requests import RecentRequests, ScoredRequest
from serving.versions.shadow_scoring import ShadowScoring

TOKEN = "0123456789abcdef0123456789abcdef"


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


class Office:
    """A desk over four versions, of which the newest came a moment ago."""

    def __init__(self) -> None:
        clock = FakeClock(10_000)
        self.versions = LoadedVersions(cast(Version, Named("0-0")), 3, now_ms=clock.now_ms)
        for seq in (1, 2, 3):
            self.versions.install(cast(Version, Named(f"1-{seq}")), committed_ms=1000 * seq)
        self.recent, self.interleaving_stats = RecentRequests(), InterleavingStats("click")
        shadow = ShadowScoring(self.versions, FakeRows(SCHEMA), 0, IdleGate(clock))
        self.admin_service = AdminService(
            self.versions, self.recent, shadow, self.interleaving_stats, clock.now_ms
        )

        key = {"authorization": f"Bearer {TOKEN}"}
        self.http = TestClient(AdminInterface(self.admin_service, AdminToken(TOKEN)), headers=key)

    def get(self, path: str) -> dict[str, Any]:
        return self._ok("GET", path)

    def put(self, path: str, **body: Any) -> dict[str, Any]:
        return self._ok("PUT", path, json=body)

    def post(self, path: str) -> dict[str, Any]:
        return self._ok("POST", path)

    def _ok(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        answer = self.http.request(method, f"/admin/v1/{path}", **given)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def office() -> Office:
    return Office()


def states(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(v["name"], v["state"]) for v in told["versions"]]


def test_versions_are_listed_with_state_age_and_reasons_of_refusal(office: Office) -> None:
    office.versions.refuse("manifests/00000004", "damaged", "a checksum differs")
    told = office.get("versions")
    assert told["served"] == "1-3" and told["activated"] is None
    assert told["versions"][0] == {
        "name": "1-3",
        "state": "served",
        "roles": [],
        "committed_ms": 3000,
        "installed_ms": 10_000,
        "age_s": 7.0,
    }
    assert states(told) == [("1-3", "served"), ("1-2", "held"), ("1-1", "held")]
    refused = {
        "name": "manifests/00000004",
        "reason": "damaged",
        "message": "a checksum differs",
        "at_ms": 10_000,
    }
    assert told["refused"] == [refused]
    json.dumps(told)


def test_a_loaded_version_is_activated_and_resumed(office: Office) -> None:
    assert states(office.post("versions/1-1/activate")) == [
        ("1-3", "held"),
        ("1-2", "held"),
        ("1-1", "served"),
    ]
    assert office.versions.served.version.name == "1-1"
    assert office.post("versions/resume")["served"] == "1-3"


@pytest.mark.parametrize("name", ["canary", "shadow", "interleave"])
def test_a_split_is_set_shown_and_removed(office: Office, name: str) -> None:
    told = office.put(name, version="previous", share=0.25)
    assert (told["version"], told["share"], told["means"]) == ("previous", 0.25, "1-2") and office.get(
        name
    ) == told
    assert office.get("versions")["versions"][1]["roles"] == [name]
    told = office.put(name, share=0)
    assert (told["version"], told["share"], told["means"]) == (None, 0, None)


def test_interleaving_reports_wins(office: Office) -> None:
    office.interleaving_stats.record_list(key_bytes(1, 0, "r"), "r", Pair("1-3", "1-2"), [1, 2], [0, 1])
    click = {"request_id": "r", "user_id": 1, "item_id": 2, "action": "click"}
    parsed = EngagementParser(SCHEMA).parse(json.dumps(click).encode(), 1)
    office.interleaving_stats.record_engagements(parsed.records)
    told = office.get("interleave")
    assert told["lists"] == told["engagements"] == 1
    assert told["results"] == [
        {"served": "1-3", "rival": "1-2", "won_by": {"served": 0, "rival": 1, "tie": 0}}
    ]


def test_slow_requests_are_listed_without_features(office: Office) -> None:
    office.recent.add(
        ScoredRequest(
            request_id="r-1",
            key=b"k",
            model_version="1-3",
            ro=b"secret",
            nro=b"",
            item_ids=np.arange(3),
            time_ms=5,
            scores_nT=np.zeros((3, 1), np.float32),
            took_s=0.25,
        )
    )
    slow = {"request_id": "r-1", "time_ms": 5, "took_ms": 250.0, "candidates": 3, "model_version": "1-3"}
    assert office.get("slow") == {"requests": [slow]}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/admin/v1/version", b"", 404),
        ("GET", "/", b"", 404),
        ("POST", "/admin/v1/versions", b"", 405),
        ("GET", "/admin/v1/versions/1-1/activate", b"", 405),
        ("POST", "/admin/v1/versions/1-9/activate", b"", 404),
        ("POST", "/admin/v1/versions/newest/activate", b"", 400),
        ("PUT", "/admin/v1/canary", b"", 400),
        ("PUT", "/admin/v1/canary", b"\xff", 400),
        ("PUT", "/admin/v1/canary", b'{"version": "newest", "share": 2}', 400),
        ("PUT", "/admin/v1/canary", b'{"version": "best", "share": 1}', 400),
        ("PUT", "/admin/v1/canary", b'{"version": "1-9", "share": 1}', 404),
        ("PUT", "/admin/v1/canary", b'{"version": "newest", "part": 1}', 400),
    ],
)
def test_an_invalid_admin_call_is_refused_in_one_sentence_and_changes_nothing(
    office: Office, method: str, path: str, body: bytes, status: int
) -> None:
    before = office.get("versions")
    answer = office.http.request(method, path, content=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and message and "\n" not in message
    assert office.get("versions") == before
