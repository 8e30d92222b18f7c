"""The machines, disks and network of a plan, and what they cost at given prices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from roostream.cli.plan.sizing import Load, Need
from roostream.schema.settings import Settings, setting

HOURS = 730  # in a month
MIN_SERVING_MACHINES = 2  # so that one can be lost
_CORES = (
    "serving processes",
    "task managers",
    "workers",
    "shards",
    "archivers",
    "compactors",
    "feature updaters",
    "auditors",
)
_PROCESS_GB = 2  # assumed, of a task manager, a worker, or an archiver
_MAX_DISK_USE = 0.8  # assumed share of a broker's disk that may be full
_KEPT_COPIES = 31  # of all rows: a commit of each kept hour and day (keep_hours, keep_days)
_STATE_ON_DISK = 1.5  # assumed bytes on disk for a byte of the joiner's state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices(Settings):
    """List prices in any currency. The defaults are assumed, of the order of a large cloud's in 2025."""

    machine_hour: float = setting(
        0.80, "assumed price of an hour of a machine (machine_cores, machine_gb)", ge=0
    )
    disk_gb_month: float = setting(0.08, "assumed price of a GB of disk for a month", ge=0)
    object_gb_month: float = setting(0.023, "assumed price of a GB in the object store for a month", ge=0)
    network_gb: float = setting(0.01, "assumed price of a GB between two zones", ge=0)
    zone_share: float = setting(
        2 / 3, "assumed share of the traffic that crosses zones; 2/3 = three zones at random", ge=0, le=1
    )
    warehouse_days: float = setting(30.0, "days of samples kept in the warehouse, not compressed", ge=0)


class Cost(NamedTuple):
    """The machines, disks and network that a load needs, and the price of each for a month (`…_month`)."""

    cores: float
    memory_gb: float
    machines: int
    broker_machines: int
    disk_gb: float
    object_gb: float
    network_mb: float  # per second, all of it
    machines_month: float
    disks_month: float
    objects_month: float
    network_month: float

    @property
    def month(self) -> float:
        return self.machines_month + self.disks_month + self.objects_month + self.network_month


def cost_of(load: Load, needs: Sequence[Need], prices: Prices) -> Cost:
    """Price a plan.

    Every process has one core, as in the plan; parts that are one process have the cores that they use. They
    are packed on machines by cores and by memory, whichever needs more, and at least two for serving. Each
    broker has a machine of its own. The rate is the peak's, all month.
    """
    amount = {need.what: need.amount for need in needs}
    cores = sum(amount[name] for name in _CORES) + max(amount["Redis"], 0.25) + 1
    memory_gb = (
        amount["shards' memory"]
        + min(amount["a serving machine's memory"], load.machine_gb * load.busy)
        * max(amount["serving machines"], MIN_SERVING_MACHINES)
        + amount["Redis' memory"]
        + amount["a compactor's memory"] * amount["compactors"]
        + amount["dedupe ids"] * amount["workers"]
        + _PROCESS_GB * (amount["task managers"] + amount["workers"] + amount["archivers"])
    )
    by_memory = memory_gb / (load.machine_gb * load.busy)
    machines = max(math.ceil(cores / load.machine_cores), math.ceil(by_memory), MIN_SERVING_MACHINES)
    brokers = int(amount["brokers"])
    rows_gb = load.rows * 8 * load.dim / 1e9  # with their state
    disk_gb = (
        amount["Kafka's disks"] * 1000 / _MAX_DISK_USE
        + 2 * rows_gb  # as much is being written
        + amount["joiner's state"] * _STATE_ON_DISK
    )
    samples_gb = load.requests_per_s * load.sample_bytes * 86_400 * prices.warehouse_days / 1e9
    object_gb = samples_gb + _KEPT_COPIES * rows_gb
    network_mb = amount["network"] + amount["row deltas from Kafka"]
    return Cost(
        cores=cores,
        memory_gb=memory_gb,
        machines=machines,
        broker_machines=brokers,
        disk_gb=disk_gb,
        object_gb=object_gb,
        network_mb=network_mb,
        machines_month=(machines + brokers) * prices.machine_hour * HOURS,
        disks_month=disk_gb * prices.disk_gb_month,
        objects_month=object_gb * prices.object_gb_month,
        network_month=network_mb * 3600 * HOURS / 1000 * prices.zone_share * prices.network_gb,
    )
