"""`roostream next-item`: a sequence model on MovieLens-1M, by the protocol of the HSTU paper."""

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
    """Train, print two lines an evaluation and write the report anew; give it back.

    Raises:
        RoostreamError: files, settings or a device that can't be used.
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

    def say(report: Mapping[str, Any]) -> None:
        _say(report["evaluations"][-1])
        if config.report:
            write_report(config.report, settings | dict(report))  # what is known, should the rest never come

    report = settings | run_next_item(config, sequences, len(rated.corpus_I), say)
    click.echo("\nwhere validation was best:")
    _say(report["best"])
    return report


def _say(told: Mapping[str, Any]) -> None:
    for name in ("validation", "test"):
        figures = " ".join(f"{told[name][column]:8.4f}" for column in _COLUMNS)
        click.echo(f"{told['epoch']:5} {told['loss']:7.4f}  {name:10} {figures}")
    sys.stdout.flush()


def _command(**given: Any) -> None:
    run(NextItemConfig(**given))


next_item = MultiValueCommand(
    "next-item",
    params=settings_flags(NextItemConfig),
    callback=_command,
    help="""What does each user of MovieLens-1M take next? Trains HSTU or SASRec on all but the last items, ranks all items.

    \b
    Example:
      roostream next-item --data movielens_1m --model hstu --epochs 100 --report hstu.json
      roostream next-item --data movielens_1m --model sasrec --epochs 100 --report sasrec.json
    """,
)
