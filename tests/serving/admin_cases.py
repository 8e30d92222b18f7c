"""The admin interface of a serving process of serving_cases.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from roostream.runtime.clock import FakeClock
from roostream.runtime.tls import TlsContext
from serving import admin
from serving.access.bearer_keys import Keyring
from serving.admin import AdminInterface, AdminService, AdminToken
from serving.http import server as http_server
from serving.versions.idle_gate import IdleGate
from serving.versions.interleaving_stats import InterleavingStats
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.recent_requests import RecentRequests
from serving.versions.shadow_scoring import ShadowScoring
from tests.serving.serving_cases import SCHEMA, InProcessServing
from tests.serving.serving_fakes import FakeRows

TOKEN = "0123456789abcdef0123456789abcdef"


def make_admin_interface(
    versions: LoadedVersions,
    recent: RecentRequests,
    stats: InterleavingStats,
    clock: FakeClock,
    token: AdminToken | Keyring | None = None,
) -> AdminInterface:
    shadow = ShadowScoring(versions, FakeRows(SCHEMA), 0, IdleGate(clock))
    service = AdminService(versions, recent, shadow, stats, clock.now_ms)
    return AdminInterface(service, token or AdminToken(TOKEN))


def make_admin_app(serving: InProcessServing) -> AdminInterface:
    stats = serving.service.interleaving_stats
    return make_admin_interface(serving.service.versions, RecentRequests(), stats, FakeClock())


@contextlib.contextmanager
def run_admin_server(serving: InProcessServing, tls: TlsContext | None = None) -> Iterator[int]:
    """Run an admin server, and return its port."""
    bound, stop = http_server.bind("127.0.0.1:0"), threading.Event()
    bound.listen(8)
    thread = threading.Thread(target=admin.run, args=(make_admin_app(serving), bound, tls, stop))
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        stop.set()
        thread.join(20)
        bound.close()
        assert not thread.is_alive()
