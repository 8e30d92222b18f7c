"""Every request that the page of the HTTP interface shows is answered as printed there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from starlette.testclient import TestClient

from serving.http.app import HttpInterface
from tests.serving.serving_cases import SCHEMA, build_serving, serve_random_weights
from tests.serving.serving_fakes import FakeRows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http.md"
_EXAMPLE = re.compile(r"^```\n(curl -s http://127\.0\.0\.1:8080/.*?')\n(?:\n(.*?)\n)?```$", re.M | re.S)
_FORM = "application/x-www-form-urlencoded"  # what curl says of a body unless told otherwise


def test_every_request_of_the_page_is_answered_as_printed(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    try:
        serve_random_weights(serving)
        http, routes = TestClient(HttpInterface(serving.context)), []
        for command, printed in _EXAMPLE.findall(PAGE.read_text()):
            _, _, url, *options = shlex.split(command)
            given = list(zip(options[::2], options[1::2], strict=True))
            headers = dict(text.split(": ") for option, text in given if option == "-H")
            [body] = [text for option, text in given if option == "-d"]
            path = url.removeprefix("http://127.0.0.1:8080")
            answer = http.post(path, content=body, headers={"content-type": _FORM} | headers)
            assert answer.status_code == 200, f"{command}\n{answer.text}"
            if path == "/v1/engagements":
                assert answer.json() == json.loads(printed)
            elif printed:  # its scores and version are those of another model
                assert list(answer.json()) == list(json.loads(printed))
            routes.append(path)
        assert routes == ["/v1/rank", "/v1/engagements", "/v2/models/default/infer"]
    finally:
        serving.close()
