"""`roostream serving-rows`: follows the shards and the rows topic, once for all serving processes of a machine. Imports no torch.

1 rows are built beside what a former one left
2 once they are complete readers are given them, and every change after that
3 a stop ends the following; the files stay, and readers go on with them
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from param_server.replica.replica import Replica
from param_server.replica.shared_files import SharedFolder
from param_server.replica.shared_rows import SharedOwner
from roostream.runtime import metrics, program
from roostream.runtime.clock import SystemClock
from roostream.runtime.crew import Crew
from roostream.runtime.exports import Exports
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import ROWS
from roostream.schema.schema_file import load_schema
from serving.rows.config import RowsConfig
from serving.rows.row_follower import RowFollower
from serving.rows.served_rows import FollowedRows, followed_numbers, open_follower

TURN_S = 0.2
JOIN_S = 5.0


def run(config: RowsConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `roostream.runtime.program.run`."""
    return program.run("serving-rows", lambda stop: keep_rows(config, stop))


def keep_rows(config: RowsConfig, stop: threading.Event) -> None:
    """Until `stop`.

    Raises:
        ConfigError, SetupError: a setting is wrong, or the folder can't be used, or another program writes there.
        UnavailableError: no room in it.
    """
    clock, health, schema = SystemClock(), Health(config.stalled_after_ms / 1000), load_schema(config.schema)
    owner = SharedOwner(
        SharedFolder(config.folder, schema, config.seed), schema, config.seed, config.buckets, clock
    ).open()
    with contextlib.closing(owner):
        replica = Replica(schema, config.seed, num_buckets=config.buckets, stores=owner.stores)
        rows = FollowedRows(open_follower(config, replica, clock, shown_by(owner)))
        exports = Exports("serving", lambda: {"ready": rows.ready, **followed_numbers(rows.follower)}, {})
        exports.register()
        metrics.serve(config, health)
        crew = Crew(stop)
        crew.start(
            "topics", clients.check_topics, config.broker, config.prefix, (ROWS,), config.partitions, stop
        )
        crew.start("rows", rows.run, stop)
        while not stop.is_set():
            health.turned("" if rows.ready else rows.waiting_for)
            clock.sleep(TURN_S, stop)
        if not crew.join(JOIN_S):
            rows.close()
        exports.unregister()
        crew.check()


def shown_by(owner: SharedOwner) -> Callable[[RowFollower], None]:
    """What a follower's step gives readers: from the first complete bootstrap on, rows and how current they are."""

    def stepped(follower: RowFollower) -> None:
        if follower.ready:
            owner.publish()
            owner.show(follower.current_s)

    return stepped
