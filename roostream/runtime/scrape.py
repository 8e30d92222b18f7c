"""Scrapes the Prometheus metrics of programs. Missing values and programs give None instead of errors."""

from __future__ import annotations

import concurrent.futures
import http.client
import math
import time
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from roostream.runtime.direct_http import open_direct

_MAX_BYTES = 4 << 20


class ScrapedMetrics:
    """The metrics of one program at one moment; empty (falsy) if it did not answer."""

    def __init__(self, samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float] | None = None) -> None:
        self._samples = dict(samples or {})

    def value(self, name: str, **labels: str) -> float | None:
        """The sample with exactly these labels; None if it is absent or not finite."""
        return number(self._samples.get((name, frozenset(labels.items()))))

    def ms(self, name: str, **labels: str) -> float | None:
        """`value` of a name that ends with `_seconds`, in milliseconds."""
        value = self.value(name, **labels)
        return None if value is None else value * 1000

    def by(self, name: str, label: str, **others: str) -> dict[str, float]:
        """Value of `label` → sample, for all samples of `name` that have this label and the label values
        `others`."""
        found, wanted = {}, others.items()
        for (other, labels), value in self._samples.items():
            if (
                other == name
                and wanted <= labels
                and (key := dict(labels).get(label)) is not None
                and number(value) is not None
            ):
                found[key] = value
        return found

    def total(self, name: str) -> float | None:
        values = [v for (other, _), v in self._samples.items() if other == name and number(v) is not None]
        return sum(values) if values else None

    def state(self, name: str, label: str) -> str | None:
        """The label value whose sample is 1 (`metrics_collector.one_of` exports states so)."""
        return next((key for key, value in self.by(name, label).items() if value == 1), None)

    def __bool__(self) -> bool:
        return bool(self._samples)


def number(value: float | None) -> float | None:
    """The value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def parse(text: str) -> ScrapedMetrics:
    """Parse the text format; malformed text gives an empty result."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, frozenset(sample.labels.items())] = sample.value
    except (ValueError, IndexError):  # the parser raises both
        return ScrapedMetrics()
    return ScrapedMetrics(samples)


def fetch(url: str, timeout_s: float = 1.0) -> ScrapedMetrics:
    """Read the metrics page at `url`. `timeout_s`: until the first byte and between two pieces of the body.
    The whole body may take five times as long, so that a program that answers slowly cannot hold the
    caller. Nothing is read from a body that is cut off or too large."""
    ends_s = time.monotonic() + 5 * timeout_s
    try:
        with open_direct(url, timeout_s) as answer:
            body = bytearray()
            while len(body) < _MAX_BYTES and (piece := answer.read1(_MAX_BYTES - len(body))):
                body += piece
                if time.monotonic() > ends_s:
                    return ScrapedMetrics()
            if answer.length or len(body) == _MAX_BYTES:  # a number may be cut off
                return ScrapedMetrics()
            return parse(body.decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException, ValueError):  # ValueError: it is no address
        return ScrapedMetrics()


def fetch_all(urls: Mapping[str, str | None]) -> dict[str, ScrapedMetrics]:
    """Program → its metrics. Scrapes in parallel, so that silent programs cost one timeout together."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        futures = {name: pool.submit(fetch, url) for name, url in urls.items() if url}
        return {name: future.result() for name, future in futures.items()}
