"""The loaded model versions: which versions stay loaded, and which of them scores a request."""

from __future__ import annotations

from typing import Any, cast

import pytest

from roostream.schema.ids import key_bytes
from serving.errors import RequestError
from serving.scorer import Version
from serving.versions.loaded_versions import LoadedVersion, LoadedVersions
from serving.versions.routing import Routing, TrafficSplit


class FakeVersion:
    """A version with a name only, because these tests score nothing."""

    def __init__(self, name: str) -> None:
        self.name = name


def version(name: str) -> Version:
    return cast(Version, FakeVersion(name))


class FakeRequest:
    def __init__(self, user: int = 1, model_version: str = "") -> None:
        self.request_id, self.model_version, self.user = f"r-{user}", model_version, user

    @property
    def key(self) -> bytes:
        return key_bytes(self.user, 0, self.request_id)


def make_versions(*names: str, keep: int = 2, **routing: Any) -> LoadedVersions:
    """Return loaded versions with these names, installed in this order."""
    versions = LoadedVersions(version("0-0"), keep, Routing(**routing), now_ms=lambda: 7)
    for name in names:
        versions.install(version(name))
    return versions


def names(versions: LoadedVersions) -> list[str]:
    return [h.version.name for h in versions.loaded]


def scored_by(versions: LoadedVersions, **request: Any) -> str:
    return versions.choose(FakeRequest(**request)).version.name


def test_the_newest_version_is_served_and_a_bounded_number_stays_loaded() -> None:
    versions = make_versions("1-1", "1-2", "1-3", keep=3)
    assert (
        names(versions) == ["1-3", "1-2", "1-1"] and scored_by(versions) == "1-3" and versions.num_swaps == 3
    )


def test_a_version_of_the_same_name_replaces_it() -> None:
    versions = make_versions("1-1", "1-2")
    versions.install(version("1-1"), committed_ms=5)
    assert names(versions) == ["1-1", "1-2"] and versions.served.committed_ms == 5


def test_an_activated_version_is_served_until_resume() -> None:
    versions = make_versions("1-1", "1-2")
    versions.activate("1-1")
    assert scored_by(versions) == "1-1"
    for seq in (3, 4, 5):
        versions.install(version(f"1-{seq}"))
    assert (
        names(versions) == ["1-5", "1-4", "1-1"]
        and scored_by(versions) == "1-1"
        and versions.newest.name == "1-5"
    )
    versions.resume()
    assert scored_by(versions) == "1-5" and names(versions) == ["1-5", "1-4"]


def test_a_change_of_the_served_version_is_announced() -> None:
    announced: list[str] = []

    def changed(loaded: LoadedVersion) -> None:
        announced.append(loaded.version.name)

    versions = make_versions("1-1")
    versions.on_change = changed
    versions.install(version("1-2"))
    versions.activate("1-1")
    versions.install(version("1-3"))
    versions.resume()
    assert announced == ["1-2", "1-1", "1-3"]


def test_a_named_version_overrides_routing() -> None:
    versions = make_versions(
        "1-1", "1-2", canary=TrafficSplit("newest", 1.0), interleave=TrafficSplit("previous", 1.0)
    )
    assert versions.choose(FakeRequest(model_version="1-1")) == (versions.named("1-1"), None)


def test_an_unloaded_version_is_404_with_the_loaded_ones() -> None:
    versions = make_versions("1-1")
    for call in (
        lambda: scored_by(versions, model_version="1-9"),
        lambda: versions.named("1-9"),
        lambda: versions.activate("1-9"),
    ):
        with pytest.raises(
            RequestError, match="1-9 is not loaded; expected one of 1-1, 0-0, or none"
        ) as error:
            call()
        assert (error.value.status, error.value.code, error.value.path) == (
            404,
            "unknown_model_version",
            "$.model_version",
        )


def test_an_invalid_version_name_is_400() -> None:
    with pytest.raises(
        RequestError, match="expected a model version as '<incarnation>-<seq>', got 'latest'"
    ) as error:
        scored_by(make_versions(), model_version="latest")
    assert error.value.status == 400


def test_with_the_newest_as_canary_other_users_get_the_previous_version() -> None:
    versions = make_versions("1-1", "1-2", canary=TrafficSplit("newest", 0.3))
    found = [scored_by(versions, user=user) for user in range(1, 400)]
    assert set(found) == {"1-1", "1-2"} and 80 < found.count("1-2") < 160
    assert found == [scored_by(versions, user=user) for user in range(1, 400)], (
        "a user always gets the same version"
    )
    assert versions.served.version.name == "1-1"


def test_the_newest_version_can_be_canary_beside_an_activated_one() -> None:
    versions = make_versions("1-1", "1-2", "1-3", keep=3, canary=TrafficSplit("newest", 0.3))
    versions.activate("1-1")
    assert {scored_by(versions, user=user) for user in range(1, 100)} == {"1-1", "1-3"}


def test_a_named_canary_stays_loaded() -> None:
    versions = make_versions("1-1", "1-2")
    versions.put(canary=TrafficSplit("1-1", 0.5))
    versions.install(version("1-3"))
    assert names(versions) == ["1-3", "1-2", "1-1"]
    assert {scored_by(versions, user=user) for user in range(1, 60)} == {"1-1", "1-3"}
    versions.put(canary=TrafficSplit())
    assert names(versions) == ["1-3", "1-2"] and scored_by(versions) == "1-3"


def test_an_unloaded_canary_has_no_users() -> None:
    assert scored_by(make_versions("1-1", canary=TrafficSplit("1-9", 1.0))) == "1-1"


@pytest.mark.parametrize(("reference", "status"), [("1-9", 404), ("best", 400), ("", 400)])
def test_a_split_of_an_unknown_version_changes_nothing(reference: str, status: int) -> None:
    versions = make_versions("1-1")
    with pytest.raises(RequestError) as error:
        versions.put(shadow=TrafficSplit("previous", 1.0), canary=TrafficSplit(reference, 0.5))
    assert error.value.status == status and error.value.path == "$.version" and versions.routing == Routing()


def test_interleaving_applies_to_its_share_of_users() -> None:
    versions = make_versions("1-1", "1-2", interleave=TrafficSplit("previous", 0.5))
    choices = [versions.choose(FakeRequest(user)) for user in range(1, 100)]
    assert {c.version.name for c in choices} == {"1-2"} and {c.rival and c.rival.name for c in choices} == {
        None,
        "1-1",
    }


def test_a_version_is_never_its_own_rival_or_shadow() -> None:
    versions = make_versions(
        "1-1", interleave=TrafficSplit("newest", 1.0), shadow=TrafficSplit("newest", 1.0)
    )
    assert versions.choose(FakeRequest()).rival is None
    assert versions.choose_shadow(FakeRequest(model_version="1-1")) is None


def test_a_shadow_scores_its_share_of_requests() -> None:
    versions = make_versions("1-1", "1-2", shadow=TrafficSplit("previous", 0.5))
    found = [versions.choose_shadow(FakeRequest(user, "1-2")) for user in range(200)]
    assert {v and v.name for v in found} == {None, "1-1"} and 70 < found.count(None) < 130


def test_withdrawn_versions_are_removed_unless_activated() -> None:
    versions = make_versions("1-1", "1-5", "1-6", keep=4)
    versions.activate("1-5")
    versions.install(versions.named("1-1"))
    versions.withdraw(lambda name: name in ("1-5", "1-6"))
    assert names(versions) == ["1-1", "1-5", "0-0"] and scored_by(versions) == "1-5"


def test_the_newest_refused_versions_are_remembered() -> None:
    versions = make_versions()
    for seq in range(30):
        versions.refuse(f"1-{seq}", "damaged", "why")
    assert next(iter(versions.refused)) == "1-10" and versions.refused["1-29"] == (
        "1-29",
        "damaged",
        "why",
        7,
    )
