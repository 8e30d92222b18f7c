"""A real serving process with access control: keys, TLS and JSON log lines, enabled by settings."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx

from serving.access.bearer_keys import new_key, write_keys
from serving.client import Client, RetryPolicy, ServingError
from tests.certificates import Authority, client_context
from tests.serving.test_serving_main import ServingProcess, write_config

PATIENT = RetryPolicy(deadline_ms=60_000)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until `condition` is true, for at most a minute."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def addresses(running: ServingProcess) -> tuple[str, str]:
    """Return the URLs of serving and of its admin interface, as soon as both are logged. Every line is
    JSON."""
    found: dict[str, str] = {}
    for line in running:
        message = json.loads(line)["message"]
        for name, pattern in (
            ("admin", r"admin interface on (https://[\d.:]+)"),
            ("serving", r"serving on (https://[\d.:]+),"),
        ):
            if match := re.search(pattern, message):
                found[name] = match[1]
        if len(found) == 2:
            return found["serving"], found["admin"]
    raise AssertionError("".join(running.lines))


def test_a_process_authenticates_callers_and_reloads_its_files(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    certificate, private_key = old.issue("serving")
    (text, key), (admin_text, admin_key) = new_key("web", ["rank"], 0), new_key("ops", ["admin"], 0)
    file = tmp_path / "keys.json"
    write_keys(file, [key, admin_key])
    settings = {
        "keys_file": str(file),
        "tls_certificate": certificate,
        "tls_key": private_key,
        "log_format": "json",
    }
    running = ServingProcess(write_config(tmp_path, admin_listen="127.0.0.1:0", **settings))
    url, admin_url = addresses(running)

    def status() -> int:
        try:
            client.rank({"candidates": [{"item_id": 1}]})
        except ServingError as error:
            return error.status
        return 200

    with Client(url, key=text, tls=client_context(old), policy=PATIENT) as client:
        assert status() == 200
        write_keys(file, [admin_key])
        wait_for(lambda: status() == 401)

    def serves_new_certificate() -> bool:
        try:
            with Client(
                url, tls=client_context(new), policy=RetryPolicy(retries=0, deadline_ms=60_000)
            ) as client:
                return not client.ready()
        except ServingError:
            return False

    new.issue("serving")
    wait_for(serves_new_certificate)
    for bearer, expected in ((text, 401), (admin_text, 200)):
        headers = {"authorization": f"Bearer {bearer}"}
        answer = httpx.get(
            f"{admin_url}/admin/v1/versions", headers=headers, timeout=60, verify=client_context(new)
        )
        assert answer.status_code == expected
    running.child.send_signal(signal.SIGTERM)
    assert running.end() == 0, "".join(running.lines)
    log = [json.loads(line) for line in running.lines]
    assert any("keys are in force" in line["message"] for line in log) and text not in "".join(running.lines)
