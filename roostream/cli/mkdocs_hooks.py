"""Hooks of MkDocs (`make docs`): add the reference pages that are made from the code."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from roostream.cli import reference_pages
from roostream.cli.main import cli


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs after it has collected the files of docs/."""
    for name, text in (
        ("settings", reference_pages.settings_page()),
        ("commands", reference_pages.commands_page(cli)),
        ("metrics", reference_pages.metrics_page()),
        ("messages", reference_pages.messages_page()),
    ):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files
