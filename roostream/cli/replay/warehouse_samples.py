"""`roostream replay warehouse`: samples of a warehouse, in the order of their close, through the same loop as a log's.

There is nothing to join: what the joiner made of the log is what lies there. With the settings of the log's own replay the
features, the batches and so the metrics are the same.
"""

from __future__ import annotations

import dataclasses

from roostream.errors import CheckpointError
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import DatasetOptions, Skipped
from roostream.replay.log_profile import LogProfile
from roostream.replay.replay_log import ReplayLog
from roostream.schema.schema import Schema

DATASET = "warehouse"
HELP = "Samples of a warehouse, in this process, as they were trained when they were new: what a log's replay says of them."
EXAMPLE = "--place .roostream/warehouse --days 2023-05-18..2023-05-22 --schema my_site.toml --report out.json"
NOT_ITS_OWN = (
    "dataset",
    "options",
    "engine",
    "speed",
    "archived_until",
    "freeze_at",
    "label_delay_ms",
    "engagement_delay_ms",
    "window_ms",
    "early_close_ms",
    "as_served",
    "lateness_ms",
    "home",
)
"""Settings of a replay that speak of what happens before a sample is there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchivedOptions(DatasetOptions):
    """Of which samples."""

    place: str = dataclasses.field(
        metadata={"help": "where samples are archived, a directory or s3://bucket/prefix"}
    )
    days: str = dataclasses.field(
        default="",
        metadata={"help": "of close, as 2024-05-01..2024-05-07; either end may be left out; '' = all"},
    )
    stored_order_until: str = dataclasses.field(
        default="",
        metadata={
            "help": "samples of days before are trained as `roostream train` reads them, by file and user; '' = by close"
        },
    )


def archived_log(config: ReplayConfig, schema: Schema) -> ReplayLog:
    """The newest version's samples, as a stream of records.

    Raises:
        ConfigError: days that are none. CheckpointError: there is no such table, nothing of these days, or it is damaged.
        UnavailableError: it can't be read now.
    """
    from roostream.warehouse.sessions.sample_table import SampleTable
    from roostream.warehouse.sessions.session import SessionSpec, days_of
    from roostream.warehouse.sessions.session_records import session_records

    options = config.options
    assert isinstance(options, ArchivedOptions)
    first, last = days_of(options.days) if options.days else ("", "")
    wanted = SessionSpec(
        table=options.place,
        version=0,
        first_day=first,
        last_day=last,
        shuffle_seed=config.seed,
        labels="as_streamed",
    )
    table = SampleTable(options.place)
    told = table.newest(wanted, {})
    if told is None or not sum(told.rows.values()):
        raise CheckpointError(
            f"{options.place}: expected samples of {options.days or 'some day'}, got none; name other days"
        )
    records = session_records(*table.open_session(told, schema), options.stored_order_until)
    return ReplayLog(
        records=records, num_requests=sum(told.rows.values()), skipped=Skipped, profile=LogProfile(schema)
    )
