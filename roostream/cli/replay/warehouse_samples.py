"""`roostream replay warehouse`: train archived samples in the order of their close, with the local engine.

The samples are joined already. With the settings of the replay of the original log, features, batches and
metrics are equal.
"""

from __future__ import annotations

import dataclasses

from roostream.errors import CheckpointError
from roostream.replay.config import ReplayConfig
from roostream.replay.datasets import DatasetOptions, Skipped
from roostream.replay.log_profile import LogProfile
from roostream.replay.replay_log import ReplayLog
from roostream.schema.schema import Schema
from roostream.schema.settings import setting_error

DATASET = "warehouse"
HELP = "Train the samples of a warehouse in this process, in the order of their close, and report metrics."
EXAMPLE = (
    "--warehouse .roostream/warehouse --days 2023-05-18..2023-05-22 --schema my_site.toml --report out.json"
)
UNUSED_SETTINGS = (
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
"""Settings of a replay that apply only before samples are joined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarehouseOptions(DatasetOptions):
    """Settings of the dataset."""

    warehouse: str = dataclasses.field(
        metadata={"help": "archive of samples: a directory or s3://bucket/prefix"}
    )
    days: str = dataclasses.field(
        default="",
        metadata={
            "help": "days on which samples closed, such as 2024-05-01..2024-05-07; either end is "
            "optional; '' = all"
        },
    )
    stored_order_until: str = dataclasses.field(
        default="",
        metadata={
            "help": "train days before this one in file order, as `roostream train` does; '' = all in the "
            "order of close"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        from roostream.warehouse.sessions.session import is_day

        if self.stored_order_until and not is_day(self.stored_order_until):
            raise setting_error("stored_order_until", "a day such as 2024-05-01", self.stored_order_until)


def open_warehouse_log(config: ReplayConfig, schema: Schema) -> ReplayLog:
    """The samples of the newest version, as a stream of records.

    Raises:
        ConfigError: the days are not valid.
        CheckpointError: there is no such table, no sample of these days, or a file is damaged.
        UnavailableError: the store cannot be read now.
    """
    from roostream.warehouse.sessions.sample_table import SampleTable, session_records
    from roostream.warehouse.sessions.session import SessionSpec, days_of

    options = config.options
    assert isinstance(options, WarehouseOptions)
    first, last = days_of(options.days) if options.days else ("", "")
    wanted = SessionSpec(
        table=options.warehouse,
        version=0,
        first_day=first,
        last_day=last,
        shuffle_seed=config.seed,
        labels="as_streamed",
    )
    table = SampleTable(options.warehouse)
    session = table.newest(wanted, {})
    if session is None or not sum(session.rows.values()):
        raise CheckpointError(
            f"{options.warehouse}: expected samples of {options.days or 'some day'}, got none; choose "
            "other days"
        )
    records = session_records(*table.open_session(session, schema), options.stored_order_until)
    return ReplayLog(
        records=records,
        num_requests=sum(session.rows.values()),
        skipped=Skipped,
        profile=LogProfile(schema),
        registry=table.warehouse.registry,
    )
