"""Reading what programs export: the Prometheus text form, into something that answers 'unknown' instead of failing."""

from __future__ import annotations

import concurrent.futures
import http.client
import math
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_MAX_BYTES = 4 << 20


class ScrapedMetrics:
    """Samples of one program at one moment; empty if it did not answer."""

    def __init__(self, samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float] | None = None) -> None:
        self._samples = dict(samples or {})

    def value(self, name: str, **labels: str) -> float | None:
        """The sample of exactly these labels; None if it is not there or not a number."""
        return number(self._samples.get((name, frozenset(labels.items()))))

    def ms(self, name: str, **labels: str) -> float | None:
        """`value` of a name that ends with `_seconds`, in milliseconds."""
        value = self.value(name, **labels)
        return None if value is None else value * 1000

    def by(self, name: str, label: str, **others: str) -> dict[str, float]:
        """Value of `label` → sample, of all samples of `name` that have the label, and the `others` with these values."""
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
        """The label value whose sample is 1: how a state is exported."""
        return next((key for key, value in self.by(name, label).items() if value == 1), None)

    def __bool__(self) -> bool:
        return bool(self._samples)


def number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def parse(text: str) -> ScrapedMetrics:
    """An unreadable text is an empty scrape."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name, frozenset(sample.labels.items())] = sample.value
    except ValueError:
        return ScrapedMetrics()
    return ScrapedMetrics(samples)


def fetch(url: str, timeout_s: float = 1.0) -> ScrapedMetrics:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return parse(answer.read(_MAX_BYTES).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException):
        return ScrapedMetrics()


def fetch_all(urls: Mapping[str, str | None]) -> dict[str, ScrapedMetrics]:
    """Program → its scrape, side by side, so that one silent program costs one time-out."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        asked = {name: pool.submit(fetch, url) for name, url in urls.items() if url}
        return {name: future.result() for name, future in asked.items()}
