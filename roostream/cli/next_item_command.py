"""`roostream next-item`: evaluate a sequence model on MovieLens-1M with the protocol of the HSTU paper."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from roostream.cli.options import MultiValueCommand, settings_flags
from trainer.next_item.config import NextItemConfig

_COLUMNS = ("HR@10", "NDCG@10", "HR@50", "NDCG@50", "MRR")


def run(config: NextItemConfig) -> dict[str, Any]:
    """Train; after each evaluation print two lines and rewrite the report. Returns the report.

    Raises:
        RoostreamError: a file, a setting or the device cannot be used.
    """
    from roostream.replay.report_files import check_report, write_report
    from trainer.next_item.movielens import read_movielens
    from trainer.next_item.sequences import group_by_user
    from trainer.next_item.training import run_next_item

    check_report(config.report)
    rated = read_movielens(Path(config.data))
    sequences = group_by_user(rated.user_N, rated.movie_N, rated.corpus_I)
    click.echo(f"{sequences.num_users} users, {len(rated.movie_N)} interactions, {len(rated.corpus_I)} items")
    click.echo(f"{'epoch':>5} {'loss':>7}  {'':10} " + " ".join(f"{name:>8}" for name in _COLUMNS))
    settings = {"settings": dataclasses.asdict(config)}

    def on_evaluation(report: Mapping[str, Any]) -> None:
        _print(report["evaluations"][-1])
        if config.report:
            write_report(config.report, settings | dict(report))  # partial, in case the run is stopped

    report = settings | run_next_item(config, sequences, len(rated.corpus_I), on_evaluation)
    click.echo("\nbest validation:")
    _print(report["best"])
    return report


def _print(evaluation: Mapping[str, Any]) -> None:
    for name in ("validation", "test"):
        figures = " ".join(f"{evaluation[name][column]:8.4f}" for column in _COLUMNS)
        click.echo(f"{evaluation['epoch']:5} {evaluation['loss']:7.4f}  {name:10} {figures}")
    sys.stdout.flush()


next_item = MultiValueCommand(
    "next-item",
    params=settings_flags(NextItemConfig),
    callback=lambda **given: run(NextItemConfig(**given)),
    help="""Predict the next item of each MovieLens-1M user.

    Trains HSTU or SASRec on all but the last items, and ranks all items.

    \b
    Example:
      roostream next-item --data movielens_1m --model hstu --epochs 100 --report hstu.json
      roostream next-item --data movielens_1m --model sasrec --epochs 100 --report sasrec.json
    """,
)
