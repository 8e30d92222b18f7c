"""`roostream check-model`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from roostream.cli.options import NonEmptyPath


@click.command("check-model")
@click.argument("file")
@click.option("--schema", "schema_file", type=NonEmptyPath(path_type=Path), required=True, help="schema TOML")
def check_model(file: str, schema_file: Path) -> None:
    """Check that a custom model meets the requirements of training and serving. FILE is its TOML, or
    FILE.py[:FUNCTION].

    Exit code 2: a check failed; each failure is explained.

    \b
    Example:
      roostream check-model shop.py --schema shop.toml
      roostream check-model model.toml --schema shop.toml
    """
    from roostream.models.build import load_model_config_or_code
    from roostream.models.custom.model_checks import Verdict, digest_of_build, forward_time_us
    from roostream.models.custom.model_checks import check_model as run_checks
    from roostream.schema.schema_file import load_schema

    schema, config = load_schema(schema_file), load_model_config_or_code(file)
    with _other_process(file, schema_file) as other:
        verdicts = run_checks(schema, config)
        printed = other.communicate()[0].splitlines()
    is_right = not any(wrong for _, wrong in verdicts)
    # The last line, because the user's file may print others.
    if is_right and printed and printed[-1] != digest_of_build(schema, config):
        wrong = (
            "expected the same bits in another process, got others; sort sets, whose order differs between "
            "processes, and use no hash()"
        )
        verdicts = [Verdict(name, wrong if name.startswith("same seed") else "") for name, _ in verdicts]
    told: set[str] = set()
    for name, wrong in verdicts:
        sentence = "for the same reason" if wrong in told else wrong
        click.echo(f"{'failed' if wrong else 'ok':8}{name}{f': {sentence}' if wrong else ''}")
        told.add(wrong)
    failed = sum(bool(wrong) for _, wrong in verdicts)
    if failed:
        number = f"{failed} of {len(verdicts)} checks" if len(verdicts) > 1 else "the check that others need"
        click.echo(f"error: {number} failed (docs/bring-your-own-model.md)", err=True)
        sys.exit(2)
    click.echo(f"{forward_time_us(schema, config):.0f} µs for a request of 20 candidates")


_DIGEST = """
import pathlib, sys
from roostream.models.build import load_model_config_or_code
from roostream.models.custom.model_checks import digest_of_build
from roostream.schema.schema_file import load_schema
print(digest_of_build(load_schema(pathlib.Path(sys.argv[2])), load_model_config_or_code(sys.argv[1])))
"""


def _other_process(file: str, schema_file: Path) -> subprocess.Popen[str]:
    """Start a process that prints the digest of its build; its sets have another order."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _DIGEST, file, str(schema_file)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
