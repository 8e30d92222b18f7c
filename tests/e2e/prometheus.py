"""A real Prometheus that scrapes a stack."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml

from infra.ports import HOST, Ports, responds_ok
from tests.contract.source_tree import ROOT
from tests.e2e.loop_stack import wait_until


class Prometheus:
    """`targets` maps a program to the URL of its /metrics. Use it as a context manager. The test is skipped
    if Prometheus is not installed."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        found = next(
            (
                p
                for p in (ROOT / ".tools/bin/prometheus", Path(shutil.which("prometheus") or "/none"))
                if p.is_file()
            ),
            None,
        )
        if found is None:
            pytest.skip("prometheus is not installed; run `make promtool`")
        self.program, self.folder, self.targets, self._ports = found, folder, targets, Ports()
        self.url = f"http://{HOST}:{self._ports.draw()}"

    def __enter__(self) -> Self:
        jobs = [
            {"job_name": name, "static_configs": [{"targets": [urllib.parse.urlsplit(url).netloc]}]}
            for name, url in self.targets.items()
        ]
        config = {
            "global": {"scrape_interval": "5s", "scrape_timeout": "5s"},
            "rule_files": [str(ROOT / "infra/alerts/roostream.rules.yml")],
            "scrape_configs": jobs,
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        with (self.folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                (
                    str(self.program),
                    f"--config.file={self.folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ),
                stdout=log,
                stderr=log,
            )
        wait_until("Prometheus is ready", lambda: responds_ok(f"{self.url}/-/ready"), 60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._ports.release()

    def get(self, path: str, **parameters: str) -> Any:
        """The field `data` of an answer of the HTTP API."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=20
        ) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The present values of the series of a query."""
        return list(self.get("query", query=expression)["result"])
