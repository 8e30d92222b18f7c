"""A running stack whose store is a bucket: it answers 503 for a while, or the disks of all shards are lost.
Commits wait or rows are fetched, and nothing is lost.

OUTAGE_S=600: for how long.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.options import StackOptions, demo
from infra.stack import Stack
from roostream.runtime.store_identity import init_store
from tests.chaos.stack_faults import control_status
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until
from tests.runtime import s3_server

OUTAGE_S = float(os.environ.get("OUTAGE_S", "30"))
WITH_STORE = ("shard", "controller", "worker", "serving", "joiner")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 + OUTAGE_S)]


class Outage:
    """A WSGI application that answers 503 while `is_away`."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application, self.is_away, self.num_refused = application, False, 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if not self.is_away:
            return self.application(environ, start_response)
        self.num_refused += 1
        start_response("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]


@contextlib.contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outage]:
    with s3_server.running():
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        outage = Outage(DomainDispatcherApplication(create_backend_app))
        server = make_server("127.0.0.1", 0, outage, threaded=True)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield outage
        finally:
            server.shutdown()
            thread.join(30)
            server.server_close()


def store_of(folder: Path) -> str:
    """An empty store: all S3 servers of a process show the same objects."""
    return f"s3://{s3_server.BUCKET}/{folder.name}"


def stack_options(store: str) -> StackOptions:
    quick = quick_options().overrides
    overrides = {**quick, **{name: {**quick.get(name, {}), "store": store} for name in WITH_STORE}}
    return demo(overrides=overrides, num_archivers=0)


def wait_for_more_commits(stack: Stack, before: int) -> None:
    wait_until(
        "50 more committed samples",
        lambda: applied(stack) >= before + 50,
        240,
        lambda: (applied(stack), control_status(stack)),
    )


def test_commits_wait_for_an_object_store_that_answers_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"OUTAGE_S={OUTAGE_S:g}")
    with object_store(monkeypatch) as outage:
        init_store(store := store_of(tmp_path))
        with Stack(tmp_path, stack_options(store)) as stack:
            stack.start(["all", "simulate"])
            stack.wait_ready("serving", timeout_s=240)
            wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)
            before = applied(stack)
            outage.is_away = True
            try:
                wait_until(
                    "the controller says that the store is away",
                    lambda: control_status(stack).get("away"),
                    120,
                    lambda: control_status(stack),
                )
                time.sleep(OUTAGE_S)
                during = control_status(stack)
            finally:
                outage.is_away = False
            assert outage.num_refused and during["away"] and during["rollbacks"] == 0, during
            wait_for_more_commits(stack, before)
            check_nothing_lost_or_twice(stack, within_s=240)
            assert stack.failed() == []


def test_rows_come_back_from_the_store_after_the_disks_of_all_shards_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(monkeypatch):
        init_store(store := store_of(tmp_path))
        with Stack(tmp_path, stack_options(store)) as stack:
            stack.start(["all", "simulate"])
            stack.wait_ready("serving", timeout_s=240)
            wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)
            before = applied(stack)
            shards = [name for name in stack.supervisor.slots if name.startswith("shard")]
            for name in shards:
                stack.kill(name)
                shutil.rmtree(stack.home.root / name)
            wait_for_more_commits(stack, before)
            logs = "".join(path.read_text() for path in stack.home.root.rglob("shard*.log"))
            assert logs.count("from the checkpoint store") >= len(shards), logs[-2000:]
            check_nothing_lost_or_twice(stack, within_s=240)
            assert stack.failed() == []
