"""How fast do samples at rest become batches?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import Question, Row, Subject, Told
from benchmarks.workloads.sharing.shared_data import EBNERD, MIND, absent

_HERE = "benchmarks.workloads.warehouse.table_reads"


def _rows(name: str, history: int, where: str, skipped: str) -> Row:
    return Row(
        name=f"{name}, {where}: a batch of all features",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("requests, by user", f"{_HERE}:read", (name, history, "requests", "user")),
            Subject("requests, in time order", f"{_HERE}:read", (name, history, "requests", "time"), "peer"),
            Subject("impressions, by user", f"{_HERE}:read", (name, history, "impressions", "user"), "peer"),
            Subject(
                "impressions, mixed within the hour",
                f"{_HERE}:read",
                (name, history, "impressions", "mixed"),
                "peer",
            ),
        ),
        skipped=skipped,
    )


def _wire(name: str, history: int, where: str, skipped: str) -> Row:
    return Row(
        name=f"{name}, {where}: a batch from the file or from the wire",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("from the file", f"{_HERE}:read", (name, history, "requests", "user")),
            Subject("from the wire", f"{_HERE}:decoded", (name, history), "peer"),
        ),
        skipped=skipped,
    )


def _projected(name: str, history: int, where: str, skipped: str) -> Row:
    of = (name, history, "requests", "user")
    return Row(
        name=f"{name}, {where}: some of the features",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("a tenth", f"{_HERE}:read", (*of, 0.1)),
            Subject("30 %, the history among them", f"{_HERE}:read", (*of, 0.3), "peer"),
            Subject("all", f"{_HERE}:read", (*of, 1.0), "peer"),
        ),
        skipped=skipped,
    )


def _fewer(told: Mapping[str, Told]) -> dict[str, float]:
    reads = {name: one.figures["reads a row group"] for name, one in told.items()}
    ours = reads["wide apart, by hit rate, merged at 8 %"]
    return {
        "reads, in no order and merged / ours": reads["in no order, merged at 8 %"] / ours,
        "reads, in no order and apart / ours": reads["in no order, apart"] / ours,
    }


def _planned(law: str, exponent: float) -> Row:
    ways = (
        ("wide apart, by hit rate, merged at 8 %", "ours", 0.08),
        ("by hit rate, merged at 8 %", "hit rate", 0.08),
        ("by hit rate, apart", "hit rate", 0.0),
        ("in no order, merged at 8 %", "hash", 0.08),
        ("in no order, apart", "hash", 0.0),
    )
    return Row(
        name=f"a tenth of 1,000 columns, as jobs ask: {law}",
        unit="jobs",
        clock="cpu",
        subjects=tuple(
            Subject(way, f"{_HERE}:planned", (order, over_read, exponent), "peer" if n else "ours")
            for n, (way, order, over_read) in enumerate(ways)
        ),
        derives=_fewer,
    )


_LOGS = (
    ("EB-NeRD", 50, "histories of up to 50", absent(EBNERD)),
    ("EB-NeRD", 500, "histories of up to 500", absent(EBNERD)),
    ("MIND", 50, "its first 2,000 requests", absent(MIND)),
)

QUESTION = Question(
    name="warehouse-read",
    asks="How fast do samples at rest become batches, and what do order, projection and merged reads save?",
    rows=(
        *(make(*of) for make in (_rows, _wire, _projected) for of in _LOGS),
        Row(
            name="100 of 1,000 floats, there in 45 % of the rows",
            unit="rows",
            clock="cpu",
            subjects=(
                Subject("a column each", f"{_HERE}:flattened", ("columns",)),
                Subject("one map column", f"{_HERE}:flattened", ("map",), "peer"),
            ),
        ),
        _planned("39 % of the features serve 80 % of what is read", 1.0),
        _planned("18 % of the features serve 80 % of what is read", 1.5),
    ),
    means="""\
From a file that the page cache has to the batch that is trained on, checksums of pages verified, one thread, row group by row
group; the wire's decoder does the same of the samples' records. A tenth of the features leaves the history out, which is most
of the bytes; the labels and what every sample says of itself are always read. Figures beside the speeds: how many reads a row
group takes when they are merged to at most 8 % more bytes than are needed, and bytes read an impression.

The last three rows are made up: floats as columns against one map column (DPP's feature flattening), equal matrices checked;
and which ranges a job reads of a row group of 700 floats of 2 KB and 300 lists of 35 KB, in the order that 40 other jobs
taught (wide columns apart from narrow ones, as files are sealed, or by hit rate alone) and in none. There the speed is
that of planning, and the figures are what is asked about.""",
    rounds=3,
)
