"""A request that came whole is answered without uvicorn's cycle: nobody outside can tell, but by the time
that it takes."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_serving import LiveServing, serving_live
from serving_cases import BODY, SCHEMA, Built, build, learn
from serving_fakes import FakeRows

from serving.client.messages import encode_impression
from serving.http.fast_path import WholeRanks
from serving.http.scoring_queue import LOOP_S, PassTimeEstimate
from serving.rank import RankResult, RankService
from serving.request import RankRequest

JSON_BODY = json.dumps(BODY).encode()
PIECE = b"POST /v1/ra"


def whole(body: bytes = JSON_BODY, query: bytes = b"", headers: Sequence[bytes] = ()) -> bytes:
    lines = [
        b"POST /v1/rank%b HTTP/1.1" % query,
        b"host: x",
        b"x-request-id: call-7",
        *headers,
        b"content-length: %d" % len(body),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer, without what changes from second to second."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1)
    first, *lines = received.decode().rstrip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    headers.pop("date")
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return int(first.split()[1]), headers, body


class Counting:
    """How many requests were taken whole."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, take = 0, WholeRanks.take

        def counted(*arguments: Any) -> None:
            self.num += 1
            take(*arguments)

        monkeypatch.setattr(WholeRanks, "take", counted)


class LoadedVersion(RankService):
    """Scores once `go` is set; notes who was scored together."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go, self.begun = threading.Event(), threading.Event()
        self.go.set()

    def rank_all(self, asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        self.begun.set()
        assert self.go.wait(30)
        return super().rank_all(asked)


@contextmanager
def open_for_whole(tmp_path: Path, **settings: Any) -> Iterator[tuple[LiveServing, Built]]:
    """What a pass takes is known."""
    built = build(tmp_path, FakeRows(SCHEMA), **settings)
    learn(built)
    with serving_live(built) as live:
        assert httpx2.post(f"{live.url}/v1/rank", json=BODY).status_code == 200
        pace = pace_of(live)
        pace.unit_s, pace.record = LOOP_S / 10, lambda *measured: None  # type: ignore[method-assign]  # whatever the machine does
        yield live, built


def pace_of(live: LiveServing) -> PassTimeEstimate:
    assert live.app.whole is not None
    return live.app.whole.endpoint.queue.pass_time


PROTOBUF = (b"content-type: application/x-protobuf", b"accept: application/x-protobuf")
BINARY = encode_impression(BODY, SCHEMA)
CASES = {
    "json": whole(),
    "protobuf": whole(BINARY, headers=PROTOBUF),
    "gzip": whole(gzip.compress(JSON_BODY), headers=[b"content-encoding: gzip"]),
    "query": whole(query=b"?top=2"),
    "append": whole(query=b"?append=true&ranked=true"),
    "version": whole(headers=[b"x-model-version: 1-9"]),
    "no json": whole(b"{"),
    "no protobuf": whole(b"\xff", headers=PROTOBUF),
    "no gzip": whole(b"zz", headers=[b"content-encoding: gzip"]),
    "no parameter": whole(query=b"?tip=2"),
    "no media": whole(headers=[b"content-type: text/csv"]),
    "no version": whole(headers=[b"x-model-version: 9-9"]),
    "no deadline": whole(headers=[b"x-deadline-ms: soon"]),
    "too many": whole(json.dumps({"candidates": {"item_id": list(range(21))}}).encode()),
    "too large": whole(b" " * 5000),
}


@pytest.mark.parametrize("name", CASES)
def test_the_answer_its_headers_and_the_record_are_those_of_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    data = CASES[name]
    with open_for_whole(tmp_path, max_body_bytes=4096) as (live, built):
        counting, said = Counting(monkeypatch), []
        for pieces in ((data,), (PIECE, data[len(PIECE) :])):
            with live.connect() as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(0.05)
                said.append(answer_of(connection))
        assert said[0] == said[1] and counting.num == 1
        assert said[0][1]["x-request-id"] == "call-7"
        records = [record.value for record in built.records()[1:]]
        assert (len(records), len(set(records))) == ((2, 1) if said[0][0] == 200 else (0, 0))
        assert live.app.gate.in_flight == 0 and built.context.watermark.horizon_ms() > 0
        registry = built.context.metrics.registry
        told = {"route": "rank", "status": str(said[0][0])}
        assert registry.get_sample_value("roostream_serving_requests_total", told) == 2 + (said[0][0] == 200)


def test_a_connection_stays_and_what_comes_meanwhile_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_for_whole(tmp_path, service=LoadedVersion) as (live, built), live.connect() as connection:
        counting, service = Counting(monkeypatch), built.service
        assert isinstance(service, LoadedVersion)
        for _ in range(3):
            connection.sendall(whole())
            assert answer_of(connection)[0] == 200
        pace_of(live).unit_s = LOOP_S * 0.99  # one, with its candidates, is too long for the loop
        service.begun.clear()
        service.go.clear()
        connection.sendall(whole())
        assert service.begun.wait(30)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" + whole(b"{"))
        time.sleep(0.05)
        service.go.set()
        assert [answer_of(connection)[0] for _ in range(3)] == [200, 200, 400]
        assert counting.num == 4


def test_who_waits_for_the_thread_is_504_at_its_deadline_and_nothing_is_logged(tmp_path: Path) -> None:
    with open_for_whole(tmp_path, service=LoadedVersion) as (live, built), live.connect() as connection:
        service = built.service
        assert isinstance(service, LoadedVersion)
        pace_of(live).unit_s = LOOP_S * 0.99
        service.go.clear()
        begin_s = time.monotonic()
        connection.sendall(whole(headers=[b"x-deadline-ms: 200"]))
        status, headers, body = answer_of(connection)
        assert status == 504 and headers["retry-after"] == "1" and b"deadline_exceeded" in body
        assert 0.19 < time.monotonic() - begin_s < 5
        assert live.app.gate.in_flight == 0
        service.go.set()
        connection.sendall(whole())
        assert answer_of(connection)[0] == 200
        assert len(built.records()) == 2, "the first one, which measured, and the last"


def test_a_stop_waits_for_who_is_being_answered_and_says_that_it_is_the_last(tmp_path: Path) -> None:
    with (
        open_for_whole(tmp_path, service=LoadedVersion, drain_ms=0) as (live, built),
        live.connect() as connection,
    ):
        service = built.service
        assert isinstance(service, LoadedVersion)
        pace_of(live).unit_s = LOOP_S * 0.99
        service.begun.clear()
        service.go.clear()
        connection.sendall(whole())
        assert service.begun.wait(30)
        live.stop.set()
        time.sleep(0.4)
        service.go.set()
        status, headers, _ = answer_of(connection)
        assert status == 200 and headers["connection"] == "close"
        assert connection.recv(1) == b""
        live.end()


def test_who_hung_up_is_logged_and_nobody_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_for_whole(tmp_path, service=LoadedVersion) as (live, built):
        service = built.service
        assert isinstance(service, LoadedVersion)
        pace_of(live).unit_s = LOOP_S * 0.99
        service.begun.clear()
        service.go.clear()
        with live.connect() as connection:
            connection.sendall(whole())
            assert service.begun.wait(30)
        time.sleep(0.1)
        service.go.set()
        assert httpx2.post(f"{live.url}/v1/rank", json=BODY).status_code == 200
        assert len(built.records()) == 3 and live.app.gate.in_flight == 0
    assert not [r for r in caplog.records if r.exc_info]


def test_a_defect_is_500_and_the_next_one_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_for_whole(tmp_path) as (live, built), live.connect() as connection:
        counting = Counting(monkeypatch)

        def broken(record: Any) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(built.context.log, "append", broken)
        connection.sendall(whole())
        status, _, body = answer_of(connection)
        assert status == 500 and b"secret" not in body and live.app.gate.in_flight == 0
        monkeypatch.undo()
        connection.sendall(whole())
        assert answer_of(connection)[0] == 200 and counting.num == 1


def test_other_calls_are_answered_while_slow_ranks_are_scored(tmp_path: Path) -> None:
    """A rank of 300 ms keeps /readyz for none of them, once one was measured."""

    class Slow(RankService):
        def rank_all(self, asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
            time.sleep(0.3)
            return super().rank_all(asked)

    with serving_live(build(tmp_path, FakeRows(SCHEMA), service=Slow)) as live:
        assert httpx2.post(f"{live.url}/v1/rank", json=BODY).status_code == 200
        with live.connect() as rank, live.connect() as other:
            took_s = []
            for _ in range(3):
                rank.sendall(whole())
                time.sleep(0.05)
                begin_s = time.monotonic()
                other.sendall(b"GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n")
                assert answer_of(other)[0] == 200
                took_s.append(time.monotonic() - begin_s)
                assert answer_of(rank)[0] == 200
        assert min(took_s) < 0.2, took_s
