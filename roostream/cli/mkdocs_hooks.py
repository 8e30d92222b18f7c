"""Hooks of MkDocs (`make docs`): add the reference pages that are made from the code, and the pages and plots
that are made from the results of benchmarks."""

from __future__ import annotations

import importlib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from roostream.cli import http_reference, reference_pages
from roostream.cli.main import cli


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs after it has collected the files of docs/."""
    for name, text in (
        ("settings", reference_pages.settings_page()),
        ("commands", reference_pages.commands_page(cli)),
        ("metrics", reference_pages.metrics_page()),
        ("http", http_reference.http_page(http_reference.application_document())),
        ("messages", reference_pages.messages_page()),
    ):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    report, plots = (importlib.import_module(f"benchmarks.{name}") for name in ("harness.report", "plots"))
    known = importlib.import_module("benchmarks.main").benchmarks_by_name()
    results = Path(config.docs_dir) / "benchmarks" / "json"
    for name, text in report.pages(known, results).items():
        files.append(File.generated(config, f"benchmarks/{name}", content=text))
    for name, text in plots.plots().items():
        files.append(File.generated(config, f"benchmarks/plots/{name}.svg", content=text))
    return files
