"""The admin port of a process of serving_cases.py."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from serving_cases import Built

from roostream.runtime.clock import FakeClock
from roostream.runtime.tls import TlsContext
from serving.admin import admin_server
from serving.admin.admin_server import AdminInterface, AdminToken
from serving.admin.admin_service import AdminService
from serving.http import server as http_server
from serving.versions.idle_gate import IdleGate
from serving.versions.recent_requests import RecentRequests
from serving.versions.shadow_scoring import ShadowScoring

TOKEN = "0123456789abcdef0123456789abcdef"


def admin_app(built: Built) -> AdminInterface:
    service, clock = built.service, FakeClock()
    shadow = ShadowScoring(service.versions, service.rows, 0, IdleGate(clock))
    admin_service = AdminService(
        service.versions, RecentRequests(), shadow, service.interleaving_stats, clock.now_ms
    )
    return AdminInterface(admin_service, AdminToken(TOKEN))


@contextlib.contextmanager
def admin_of(built: Built, tls: TlsContext | None = None) -> Iterator[int]:
    """Its port."""
    bound, stop = http_server.bind("127.0.0.1:0"), threading.Event()
    bound.listen(8)
    thread = threading.Thread(target=admin_server.run, args=(admin_app(built), bound, tls, stop))
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        stop.set()
        thread.join(20)
        bound.close()
        assert not thread.is_alive()
