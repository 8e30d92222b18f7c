"""Tables and lines of text for `status`, the demo, `audit` and `checkpoint list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roostream.cli.output import NONE, Row, clock, duration, number
from roostream.errors import printable
from roostream.runtime.kafka.topics import EVENTS
from trainer.control.holds import DeviceUse
from trainer.control.types import Hold
from trainer.selection.decision import NAMES, STALE
from trainer.selection.outcomes import unaccounted_requests


def rows(status: Mapping[str, Any]) -> list[Row]:
    """(name, text) of each row of the status; problems come first."""
    return [
        *(("HELD", _hold(hold)) for hold in status["commit"]["holds"] or ()),
        *(("NOT READY", f"{name}: {text}") for name, text in status["troubles"].items()),
        ("programs", _programs(status["programs"])),
        ("records /s", f"{_rates(status['rates'])}; heartbeats among the first two"),
        ("joiner", _joiner(status["joiner"])),
        *_closed_by(status["guarantees"]["g1"]),
        ("trainer", _trainer(status["trainer"])),
        *_outcomes(status["trainer"]),
        *_workers(status["workers"]),
        *_readers(status.get("readers")),
        ("rows", ", ".join(f"{k} {v:,}" for k, v in status["rows"].items()) or NONE),
        ("commit", _commit(status["commit"])),
        ("devices", _devices(status["commit"])),
        ("freshness", _freshness(status["freshness"])),
        ("quality", _quality(status["metrics"])),
        ("click rate", _click_rate(status["click_rate"])),
        *book_rows(status["guarantees"]["g1"]),
        *_lost(status["lost_records"]),
    ]


def book_rows(sums: Mapping[str, Any]) -> list[Row]:
    """Rows for the sums of an audit, including `state`."""
    return [("accounted", _g1(sums)), *_named(sums)]


def commit_rows(commits: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows for the commits of `roostream.cli.checkpoint.checkpoints.list_commits`."""
    return [
        (str(one["seq"]), f"cannot be read: {one['problem']}" if "problem" in one else _commit_line(one))
        for one in commits
    ]


def _commit_line(one: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{what} {one[f'{what}_bytes'] / 1e6:,.1f} MB" for what in ("dense", "workers", "rows"))
    quality = f"NE {number(one['quality']['ne'], 4)} AUC {number(one['quality']['auc'], 4)}"
    when = f"{clock(one['time_ms'])}, step {one['step']:,}, trained up to {clock(one['watermark_ms'])}"
    copied = f" ({one['copied_bytes'] / 1e6:,.1f} MB in the store)" if one["copied_bytes"] else ""
    kept = f"kept as {one['tier']}" if one["tier"] else "not kept after the next commit"
    return f"{one['incarnation']}-{one['seq']} of {when}; {sizes}{copied}; {kept}; {quality}"


def line(status: Mapping[str, Any], elapsed_s: float) -> str:
    """The status as one line, for logs."""
    trainer, rate, g1 = status["trainer"], status["click_rate"], status["guarantees"]["g1"]
    servable = status["freshness"]["engagement_to_servable"]
    parts = [
        f"{elapsed_s:5.0f} s",
        f"impressions/s {number(status['rates']['impressions'], 1)}",
        f"samples/s {number(status['rates']['samples'], 1)}",
        f"trainer {trainer['state'] or NONE} trained {number(trainer['trained'])}",
        f"commit {number(status['commit']['seq'])}",
        f"NE {number(status['metrics']['ne'], 4)} AUC {number(status['metrics']['auc'], 4)}",
        f"clicks served/random {number(rate['served_to_random'], 2)} (all "
        f"{number(rate['served_to_random_total'], 2)})",
        f"servable p50 {duration(servable['p50_ms'])}",
        f"accounted {g1['state']}",
    ]
    bad = status["troubles"]
    return printable(" · ".join([*parts, *([f"not ready: {', '.join(bad)}"] if bad else [])]))


def _programs(programs: Mapping[str, Any]) -> str:
    ready = [n for n, p in programs.items() if p["state"] == "ready"]
    others = [f"{n} {p['state']}" for n, p in programs.items() if p["state"] != "ready"]
    restarts = sum(p["restarts"] for p in programs.values())
    return ", ".join([f"{len(ready)} ready", *others, f"{restarts} restarts"])


def _rates(rates: Mapping[str, float | None]) -> str:
    return ", ".join(f"{topic} {number(rate, 1)}" for topic, rate in rates.items())


def _joiner(joiner: Mapping[str, Any]) -> str:
    counts = f"{number(joiner['checkpoints'])} checkpoints, {number(joiner['restarts'])} restarts"
    return f"{joiner['state'] or NONE}, watermark {clock(joiner['watermark_ms'])}, {counts}"


def _closed_by(sums: Mapping[str, Any]) -> list[Row]:
    """What closed the requests joined so far, the most frequent first; no row before the first sample."""
    counts: Mapping[str, int] = sums.get("closed_by") or {}
    total = sum(counts.values())
    if not total:
        return []
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [("closed by", ", ".join(f"{reason} {count / total:.0%}" for reason, count in ordered))]


def _trainer(t: Mapping[str, Any]) -> str:
    where = (
        f"watermark {clock(t['watermark_ms'])}, behind {duration(t['lag_ms'])} / "
        f"{number(t['lag_records'])} samples"
    )
    eta = f", caught up in {duration(t['eta_s'] * 1000)}" if t["eta_s"] else ""
    counts = f"step {number(t['step'])}, trained {number(t['trained'])} as of the last commit"
    counts += f"; since the workers started: trained {number(t['requests'])}"
    counts += f", skipped {number(t['duplicates'])}"
    counts += f", replayed {number(t['rehearsed'])}" if t["rehearsed"] else ""
    reason = t["reason"] or ("not every worker reports" if t["state"] == "unknown" else "")
    why = f" ({reason})" if reason and t["state"] != "held" else ""  # a row of its own has that of a hold
    return f"{t['state'] or NONE}{why}{_history(t['initial'])}{eta}, {where}, {counts}"


def _outcomes(t: Mapping[str, Any]) -> list[Row]:
    """Outcomes of the requests taken; no row if all were trained."""
    outcomes = t["outcomes"]
    if not outcomes or outcomes["taken"] == outcomes["trained"]:
        return []
    parts = " + ".join(
        f"{n:,} {name}" for name, n in outcomes.items() if name != "taken" and (n or name == "trained")
    )
    missing = unaccounted_requests(outcomes)
    error = f"; ERROR: {missing:,} are missing" if missing else ""
    text = f"{outcomes['taken']:,} requests since the workers started = {parts}{error}"
    return [("selection", text), *_control(outcomes)]


def _control(outcomes: Mapping[str, int]) -> list[Row]:
    """The settings of a random control for Slipstream, without which its effect cannot be judged."""
    if not outcomes.get(NAMES[STALE]):
        return []
    keep = 1 - outcomes[NAMES[STALE]] / outcomes["taken"]
    text = (
        f'policy = "random", keep = {keep:.3f} skips equally many requests at random; compare with that run'
    )
    return [("control", text)]


def _readers(readers: Mapping[str, Any] | None) -> list[Row]:
    """No row if no session is read by reader programs."""
    if not readers or not (readers["there"] or readers["splits_wanted"]):
        return []
    lines = [
        f"{readers['there']} of {readers['wanted']} wanted ({readers['least']} to {readers['most']}), "
        f"{readers['splits_wanted']} splits waited for"
    ]
    if readers["leases_expired"]:
        lines[0] += f", {readers['leases_expired']:,} leases expired"
    for worker, buffer in sorted(readers["buffers"].items(), key=lambda item: int(item[0])):
        share = "" if buffer["stall_share"] is None else f", {100 * buffer['stall_share']:.1f} % of the time"
        pieces = f"{100 * buffer['fullness']:.0f} % full, {number(buffer['pieces'])} pieces"
        waited = duration(buffer["stalled_s"] * 1000)
        lines.append(f"worker {worker}: buffer {pieces}; waited {waited}{share}")
    for name, reader in sorted(readers["readers"].items()):
        splits = [str(lease["split"]) for lease in readers["leases"] if lease["reader"] == name]
        has = f"splits {', '.join(splits)}" if splits else "no lease"
        lines.append(
            f"{name}: {has}; {number(reader.get('requests'))} requests read, last report "
            f"{duration(reader['silent_s'] * 1000)} ago"
        )
    return [("readers", "\n".join(lines))]


def _history(initial: Mapping[str, Any] | None) -> str:
    """Progress of the initial phase; "" when the stream is trained."""
    if not initial:
        return ""
    trained = initial["records"] - initial["left"]
    of_history = f"{trained:,} of {initial['records']:,} samples committed"
    last_ms, (eta_s, _, _) = initial.get("last_close_ms"), initial.get("eta_s") or (None, None, None)
    event_time = f", up to {clock(last_ms)}" if last_ms else ""
    left = "unknown" if eta_s is None else duration(eta_s * 1000)
    return (
        f" (history: {of_history}, epoch {initial['epoch']} of {initial['epochs']}{event_time}, time "
        f"left {left})"
    )


def _workers(workers: Mapping[str, Any]) -> list[Row]:
    """No row if one worker trains and one is requested."""
    if workers["number"] == workers["wanted"] and len(workers["each"]) < 2:
        return []
    target = "" if workers["wanted"] == workers["number"] else f", {number(workers['wanted'])} requested"
    rows = [f"{number(workers['number'])} training{target}"]
    for name, worker in workers["each"].items():
        trained = f"trained {number(worker['requests'])} since its start"
        active = trained if worker["trains"] else "standing by"
        silent = duration(worker["silent_ms"])
        rows.append(
            f"{name}: {worker['broken'] or active}, step {number(worker['step'])}, last report {silent} ago"
        )
    return [("workers", "\n".join(rows))]


def _commit(c: Mapping[str, Any]) -> str:
    counts = (
        f"{number(c['commits'])} since the start, {number(c['aborts'])} aborted, "
        f"{number(c['rollbacks'])} rollbacks"
    )
    name = NONE if c["seq"] is None else f"{c['incarnation']}-{c['seq']}"
    return f"{c['state'] or NONE}, {name}, age {duration(c['commit_age_ms'])}, {counts}"


def _hold(hold: Mapping[str, Any]) -> str:
    member = f"{hold['member']}: " if hold["member"] else ""
    return f"since {clock(hold['since_ms'])} UTC, {hold['kind']}: {member}{Hold(**hold).describe()}"


def _devices(control: Mapping[str, Any]) -> str:
    """Device time by use, as ratios to the time in training."""
    spent, to_training = control["device_s"], control["device_ratio"]
    if not spent:
        return NONE
    others = {name: name.replace("_", " ") for name in spent if name != DeviceUse.TRAINING}
    trained = f"training {duration(spent[DeviceUse.TRAINING] * 1000)}"
    if to_training[DeviceUse.TRAINING] is None:
        return ", ".join(
            [trained, *(f"{called} {duration(spent[name] * 1000)}" for name, called in others.items())]
        )
    ratios = ", ".join(f"{called} {to_training[name]:.2f}" for name, called in others.items())
    return f"{trained}; relative to training: {ratios}"


def _freshness(stages: Mapping[str, Mapping[str, float | None]]) -> str:
    return "\n".join(
        f"{s.replace('_', ' ')}: p50 {duration(v['p50_ms'])}, p99 {duration(v['p99_ms'])}"
        for s, v in stages.items()
    )


def _quality(m: Mapping[str, float | None]) -> str:
    names = {
        "ne": "NE",
        "auc": "AUC",
        "request_auc": "request AUC",
        "mrr": "MRR",
        "ndcg@10": "nDCG@10",
        "calibration": "calibration",
    }
    return (
        ", ".join(f"{label} {number(m[k], 4)}" for k, label in names.items())
        + f" over {number(m['requests'])} requests"
    )


def _click_rate(r: Mapping[str, float | None]) -> str:
    orders = ", ".join(f"{o} {NONE if r[o] is None else f'{r[o]:.4f}'}" for o in ("served", "random", "best"))
    now, total = number(r["served_to_random"], 2), number(r["served_to_random_total"], 2)
    return f"{orders}; served / random is {now} now, {total} since the start"


def _g1(sums: Mapping[str, Any]) -> str:
    """Whether every event is accounted for. There are no figures before all records present at the start have
    been read."""
    if sums["state"] == "reading":
        return f"still reading, {number(sums['behind'])} records left"
    if sums["engagements"] is None:
        return "unknown, because not every auditor answers"
    names = ("folded", "corrected", "only_repeated", "dead_engagements")
    words = dict(zip(names, ("folded", "corrected", "only in a repeated sample", "dead"), strict=True))
    parts = " + ".join(f"{sums[k]:,} {word}" for k, word in words.items() if sums[k] or k != "only_repeated")
    events = f"{sums['engagements']:,} engagements = {parts} + {sums['pending']:,} pending"
    requests = f"{sums['requests']:,} requests: {sums['samples']:,} samples, {sums['dead_requests']:,} dead, "
    verdicts = {
        "yes": "yes",
        "no": f"NO, {sums['overdue']:,} are missing",
        "waiting": f"not yet, {sums['late']:,} wait for the joiner, which is behind",
    }
    unknown = "unknown now, because Kafka did not report its end offsets in time; before that"
    if misplaced := sum(sums["misplaced"].get(topic, 0) for topic in EVENTS):
        unknown = f"unknown, because {misplaced:,} events lie in partitions of other keys; among the others"
    verdict = verdicts.get(sums["state"], unknown)
    return f"{verdict}: {events}; {requests}{sums['pending_requests']:,} pending"


def _named(sums: Mapping[str, Any]) -> list[Row]:
    """Counts by reason, and counts outside of the sums; no row for zero counts."""
    if sums["state"] == "reading" or sums["engagements"] is None:
        return []
    found = [
        ("dead letters", sums["dead_letters"]),
        ("untrained", sums["untrained_by"]),
        ("unreadable", sums["unreadable"]),
        ("misplaced", sums["misplaced"]),
    ]
    if {*sums["predicted_by"]} - {"trained"}:
        found.append(("predicted", sums["predicted_by"]))
    rows = [
        (name, ", ".join(f"{reason} {n:,}" for reason, n in sorted(by.items())))
        for name, by in found
        if any(by.values())
    ]
    if sums["since_ms"]:
        rows.append(("audited", f"events since {clock(sums['since_ms'])}; retention deleted earlier ones"))
    words = {
        "stale": "duplicates of events that were settled long ago",
        "lost_records": "records that were deleted before they were read",
    }
    return rows + [("not counted", f"{sums[k]:,} {word}") for k, word in words.items() if sums[k]]


def _lost(lost: Mapping[str, int]) -> list[Row]:
    return [
        (
            "LOST",
            f"{name} missed {n:,} records since its start: retention deleted them, or a broker stopped "
            "uncleanly and lost them; its log says which",
        )
        for name, n in lost.items()
    ]
