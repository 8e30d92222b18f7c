"""The files of the front page and its data, `/page.json`."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

from roostream.runtime.histograms import RecentQuantiles, freshness_histogram
from serving.context import ServingContext
from serving.examples import rank_example

FORMAT = 1
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/parts.js": ("parts.js", "text/javascript; charset=utf-8"),
}
DOCUMENT = "/page.json"
_FRESH = "engagement_to_servable"


@functools.cache
def file_content(path: str) -> bytes:
    """The content of a file of the page, by URL path."""
    return resources.files("serving.page").joinpath("web", FILES[path][0]).read_bytes()


def page_document(context: ServingContext, release: str, recent: RecentQuantiles) -> dict[str, Any]:
    """What the page shows; times in seconds, null = unknown. `recent` keeps the freshness of earlier
    calls."""
    versions, schema, row_metrics = context.service.versions, context.schema, context.row_metrics()
    served, waiting_for = versions.served, context.waiting_for()
    now_ms = context.watermark.clock.now_ms()
    recent.add(context.watermark.clock.monotonic_s(), freshness_histogram().buckets(_FRESH))
    links = {"docs": "docs", "openapi": "openapi.json", "metrics": "metrics"}
    return {
        "format": FORMAT,
        "release": release,
        "schema": schema.name,
        "ready": not waiting_for,
        "waiting_for": waiting_for,
        "served": {
            "name": served.version.name,
            "age_s": (now_ms - served.committed_ms) / 1000 if served.committed_ms else None,
            "trained_up_to_ms": served.trained_up_to_ms or None,
        },
        "versions": [loaded.version.name for loaded in versions.loaded],
        "rows": row_metrics.get("roostream_serving_replica_rows"),
        "rows_age_s": context.rows_age_s(),
        "freshness": {f"p{round(100 * q)}_s": recent.quantile(q) for q in (0.5, 0.99)},
        "tasks": list(schema.tasks),
        "features": {"ro": len(schema.ro), "nro": len(schema.nro)},
        "example": rank_example(schema),
        "links": links | ({"trainer": context.config.status_page} if context.config.status_page else {}),
    }
