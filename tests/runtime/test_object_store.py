"""The checkpoint store in a bucket: behavior beyond the contract in
tests/contract/test_checkpoint_store.py."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import CheckpointError, ConfigError, SetupError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import PART_BYTES, open_store
from roostream.runtime.retention import Retention, StoreCleaner
from roostream.runtime.store_identity import init_store
from tests.runtime import s3_server
from tests.runtime.manifest_cases import a_manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server.running() as url:
        yield url


def test_the_commit_log_lives_in_a_bucket(s3: str) -> None:
    store, other = (open_store(f"s3://{s3_server.BUCKET}/log") for _ in range(2))
    assert manifests.claim_incarnation(store, 0) == 1 and manifests.claim_incarnation(other, 0) == 2
    for seq in (1, 2, 3):
        assert store.create(manifests.manifest_name(seq), a_manifest(seq).encode())
    assert not other.create(manifests.manifest_name(3), b"late")
    newest = manifests.newest(other)
    assert newest is not None and newest.manifest.seq == 3
    StoreCleaner(store, Retention(2)).clean()
    assert manifests.numbers(other) == [2, 3]
    assert manifests.discard_after(store, 2) == [3] and manifests.next_seq(other) == 4


def test_a_prefix_is_a_store_of_its_own(s3: str) -> None:
    one, two = (open_store(f"s3://{s3_server.BUCKET}/{name}") for name in ("one", "two"))
    one.put("dense/1", b"a")
    assert two.list("dense") == [] and one.list("dense") == ["dense/1"]


def test_large_objects_are_complete_or_absent(s3: str) -> None:
    store = open_store(f"s3://{s3_server.BUCKET}/large")
    data = bytes(range(256)) * (1 << 16)
    store.put("dense/1", data)
    assert store.create("dense/2", data) and store.get("dense/1") == store.get("dense/2") == data


def test_an_upload_that_fails_leaves_no_hidden_parts(s3: str) -> None:
    store, client = open_store(f"s3://{s3_server.BUCKET}/failed"), boto_client(s3)

    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield bytes(PART_BYTES)
        assert client.list_multipart_uploads(Bucket=s3_server.BUCKET)["Uploads"], (
            "no part was uploaded before the failure"
        )
        raise CheckpointError("the segment is damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        store.put_stream("segments/0-1-1", chunks(), 10 * PART_BYTES)
    assert store.list("segments") == []
    assert "Uploads" not in client.list_multipart_uploads(Bucket=s3_server.BUCKET)


def test_the_life_cycle_rule_ends_unfinished_uploads_and_deletes_no_object(s3: str) -> None:
    configuration = json.loads((ROOT / "infra/s3/lifecycle.json").read_text())
    client = boto_client(s3)
    client.put_bucket_lifecycle_configuration(Bucket=s3_server.BUCKET, LifecycleConfiguration=configuration)
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket=s3_server.BUCKET)["Rules"]
    assert rule.pop("AbortIncompleteMultipartUpload") == {"DaysAfterInitiation": 1}
    assert rule.keys() == {"ID", "Status", "Filter"} and rule["Status"] == "Enabled"


def boto_client(url: str) -> Any:
    """A client for the S3 calls that the store itself does not use."""
    return pytest.importorskip("boto3", reason="boto3, which comes with moto, is not installed").client(
        "s3", endpoint_url=url
    )


def test_a_claim_of_one_program_does_not_disturb_the_store_check_of_another(s3: str) -> None:
    """The check runs at the first `create`, while other programs claim and sweep."""
    url, stop = f"s3://{s3_server.BUCKET}/check", threading.Event()

    def sweep() -> None:
        while not stop.wait(0.001):
            open_store(url).sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for n in range(20):
            assert open_store(url).create(f"manifests/{n:08d}", b"x")
    finally:
        stop.set()
        sweeper.join()
    assert not open_store(url).create("manifests/00000000", b"y")


@contextlib.contextmanager
def always_answering(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes = b""
) -> Iterator[list[tuple[str, str]]]:
    """A server that gives the same answer to every request. Yields the requests as (method,
    If-None-Match)."""
    pytest.importorskip("obstore", reason="obstore, the client of S3 stores, is not installed")
    requests: list[tuple[str, str]] = []

    class AlwaysHandler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            requests.append((self.command, self.headers.get("If-None-Match", "")))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in (
                ("ETag", '"e"'),
                ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT"),
                ("Content-Length", str(len(body))),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), AlwaysHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "secret-of-mine",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        yield requests
    finally:
        server.shutdown()
        server.server_close()


def test_a_store_that_ignores_if_none_match_is_refused_before_anything_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        always_answering(monkeypatch, 200, b"second") as requests,
        pytest.raises(SetupError, match="create a name twice"),
    ):
        open_store("s3://bucket").create("manifests/1", b"x")
    assert requests[:2] == [("PUT", "*"), ("PUT", "*")], (
        "both requests must carry the condition If-None-Match: *"
    )


def test_a_create_with_an_unknown_outcome_is_reported_and_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        always_answering(monkeypatch, 503) as requests,
        pytest.raises(UnavailableError, match=r"s3://bucket/\S+ can't be written") as caught,
    ):
        open_store("s3://bucket").create("manifests/1", b"x")
    assert [method for method, _ in requests] == ["PUT"]
    assert "secret-of-mine" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_create_that_meets_a_conflict_does_not_say_that_the_name_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = b"<Error><Code>ConditionalRequestConflict</Code><Message>Try again.</Message></Error>"
    with (
        always_answering(monkeypatch, 409, body),
        pytest.raises(UnavailableError, match="ConditionalRequestConflict: Try again"),
    ):
        open_store("s3://bucket").create("manifests/1", b"x")


def test_an_unavailable_store_differs_from_a_missing_object(monkeypatch: pytest.MonkeyPatch) -> None:
    with always_answering(monkeypatch, 500), pytest.raises(UnavailableError, match="can't be read"):
        open_store("s3://bucket").get("manifests/1")
    with (
        always_answering(monkeypatch, 404),
        pytest.raises(CheckpointError, match="is absent from s3://bucket"),
    ):
        open_store("s3://bucket").get("manifests/1")


def test_a_proxy_that_hides_the_store_is_named(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://ann:secret@127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(UnavailableError, match=r"proxy http://\S*@127\.0\.0\.1:1 unless NO_PROXY") as error:
        open_store(f"s3://{s3_server.BUCKET}/behind").get("dense/1")
    assert "secret" not in str(error.value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(CheckpointError, match="absent"):
        open_store(f"s3://{s3_server.BUCKET}/behind").get("dense/1")


def test_a_bucket_that_does_not_exist_is_named_and_never_taken_for_a_missing_object(s3: str) -> None:
    store = open_store("s3://nowhere/x")
    calls: list[Callable[[], object]] = [
        lambda: init_store("s3://nowhere/x"),
        lambda: store.create("manifests/1", b"x"),
        lambda: store.put("manifests/1", b"x"),
        lambda: store.get("manifests/1"),
        lambda: store.get_range("manifests/1", 0, 1),
        lambda: store.list("manifests"),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="NoSuchBucket: The specified bucket does not exist"):
            call()


def test_an_endpoint_without_encryption_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore, the client of S3 stores, is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(ConfigError, match="AWS_ALLOW_HTTP=true"):
        open_store("s3://bucket")


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://bucket/Upper", "s3://bucket/../x"])
def test_an_invalid_store_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a store like s3://bucket/prefix"):
        open_store(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(SetupError, match=r"install roostream\[s3\]"):
        open_store("s3://bucket")
