"""`roostream train`: train a model from the warehouse, without Kafka."""

from __future__ import annotations

import sys
from typing import Any

import click

from roostream.cli.options import MultiValueCommand, settings_flags
from roostream.cli.train.config import TrainConfig


def run(config: TrainConfig) -> int:
    """Returns the exit code: 0 = everything is trained and committed; 2 = a setting is wrong or something is
    unavailable."""
    from roostream.cli.options import parse_overrides
    from roostream.cli.output import progress_bar
    from roostream.errors import ConfigError, needs_extra
    from roostream.replay.report_files import check_report, write_report
    from roostream.runtime import program
    from trainer.config import LoopConfig

    def body(stop: program.Stop) -> None:
        with needs_extra("a warehouse", "warehouse"):
            from roostream.cli.train.offline import train_offline
        check_report(config.report)
        chosen = parse_overrides(config.set)
        if unknown := sorted(chosen.keys() - {"worker"}):
            raise ConfigError(
                f"--set: expected worker.KEY=VALUE, got {unknown[0]}.…; `train` has no such program"
            )
        with progress_bar("requests") as update:
            report = train_offline(config, LoopConfig(**chosen.get("worker", {})), stop, update)
        if config.report:
            write_report(config.report, report)
        click.echo(_summary(report))

    return program.run("train", body, is_command=True)


def _summary(report: dict[str, Any]) -> str:
    from roostream.cli.output import number

    ne, auc, calibration = (number(report["metrics"].get(name), 4) for name in ("ne", "auc", "calibration"))
    text = (
        f"{report['requests']:,} requests, {report['candidates']:,} impressions in {report['wall_s']:.1f} s "
        f"({report['requests_s']:,.0f} per second); version {report['version_of_model']} with "
        f"{report['steps']:,} steps; NE {ne}, AUC {auc}, calibration {calibration}"
    )
    if sent := report.get("exchange", {}).get("exchanged_bytes", 0):
        less = f"{report['exchange']['impression_bytes'] / sent:.1f} times less than for expanded impressions"
        text += f"; {sent / 1e6:,.1f} MB exchanged between workers, {less}"
    return text


train = MultiValueCommand(
    "train",
    params=settings_flags(TrainConfig),
    callback=lambda **given: sys.exit(run(TrainConfig(**given))),
    help="""Train a model from the warehouse, without Kafka.

    One worker runs in this process, several run in processes of their own. With --rows torchrec they also
    hold the embedding rows, in TorchRec's sharded collections. `roostream up` continues from the last commit.

    \b
    Example:
      roostream train --days 2024-05-01..2024-05-07 --warehouse .roostream/warehouse --home .trained
      roostream up --home .trained
    """,
)
