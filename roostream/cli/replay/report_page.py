"""report.html: the report as a self-contained page with inlined figures."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roostream.cli.output import Row, clock
from roostream.cli.replay.report_table import join_rows, number
from roostream.errors import SetupError, needs_extra, printable
from roostream.replay.report_files import write_atomically
from trainer.monitoring.progressive_metrics import METRIC_NAMES
from trainer.monitoring.verdict import WORDS

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #ccc;padding:.2rem "
    ".6rem;text-align:left}"
    "svg{max-width:100%;height:auto}.warning{background:#fff3cd;padding:.3rem .6rem;margin:.3rem 0}"
)
_FIGURES = ("share", "min", "mean", "max")


def write_page(path: Path, title: str, report: Mapping[str, Any]) -> None:
    """Write the page atomically.

    Raises:
        SetupError: matplotlib is not installed.
        ConfigError: the file cannot be written; an existing file is unchanged.
    """
    with needs_extra("a report as a page (--report FILE.json makes none)", "replay", SetupError):
        from roostream.cli.replay.report_figures import figures_of
    write_atomically(path, page_of(title, report, figures_of(report)))


def page_of(title: str, report: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    """The HTML of the page; `figures`: heading → SVG."""
    features = (
        (name, f["side"], f["kind"], *(number(f[key]) for key in _FIGURES))
        for name, f in report["log"]["features"].items()
    )
    sections = {
        "Is the model better than the baselines?": _verdict(report["verdict"]),
        **({"Models of this pass": _models(report["models"])} if "models" in report else {}),
        "Model and baselines": table(
            ("", "requests", *METRIC_NAMES, *_amount_names(report)), _metric_rows(report)
        ),
        **({"Windows, before they were trained": _streaming(report)} if "streaming" in report else {}),
        **figures,
        "What happened to the log": table((), join_rows(report)),
        "Features": table(("feature", "side", "kind", *_FIGURES), features),
        "Settings": table((), _flat({"training": report["training"], **report["settings"]})),
    }
    return page(title, report["warnings"], sections)


def page(title: str, warnings: Iterable[str], sections: Mapping[str, str]) -> str:
    """A self-contained page; `sections`: heading → HTML."""
    parts = [f"<h1>{_text(title)}</h1>"]
    parts += [f'<p class="warning">{_text(warning)}</p>' for warning in warnings]
    parts += [f"<h2>{_text(name)}</h2>{section}" for name, section in sections.items()]
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


_METHOD = (
    "Differences are the model minus the baseline on the same requests. Intervals are normal approximations "
    "over requests and cover all baselines at once with 95 %. Higher is better for request AUC, lower for NE."
)


def _verdict(verdict: Mapping[str, Any]) -> str:
    """The sentence, the likely reasons, and the comparison with each baseline, also by tenths of the log."""
    parts = [f"<p>The model is {_text(verdict['sentence'])}.</p>"]
    if reasons := verdict["likely_reasons"]:
        parts.append("<p>Likely reasons, the likeliest first:</p>")
        parts.append(table(("found in this run", "to change"), ((r["fact"], r["change"]) for r in reasons)))
    for metric, word in WORDS.items():
        compared = verdict[metric]
        if not compared["baselines"]:
            continue
        judged = f"{word}, {compared['requests']} requests"
        head = (judged, "model", "baseline", "difference", "interval")
        rows = (
            (name, *(number(x) for x in (compared["model"], each["value"], each["difference"])), _span(each))
            for name, each in compared["baselines"].items()
        )
        parts += [table(head, rows), _windows(verdict["windows"], metric, word)]
    return "".join([*parts, f"<p>{_METHOD}</p>"])


def _models(models: Sequence[Mapping[str, Any]]) -> str:
    """Metrics of each model, and its verdict against the baselines and against the first."""
    rows = (
        (
            m["model"],
            number(m["metrics"]["measured"]["requests"]),
            *(number(m["metrics"]["measured"][name]) for name in METRIC_NAMES),
            m["verdict"]["sentence"],
            m["against_first"]["sentence"] if "against_first" in m else "–",
        )
        for m in models
    )
    head = ("model", "requests", *METRIC_NAMES, "against the baselines", f"against {models[0]['model']}")
    return table(head, rows)


_STREAMING = (
    "Each window was scored with the weights and rows that were trained on the windows before it, and then "
    "trained. Metrics are of the first label."
)


def _streaming(report: Mapping[str, Any]) -> str:
    """The metrics of each evaluated window, their mean, and those of all windows together."""
    streaming = report["streaming"]
    rows = [
        (f"window {w['window']} from {clock(w['begin_ms'])}", w["requests"], w) for w in streaming["windows"]
    ]
    rows += [("mean of the windows", None, streaming["mean"])]
    rows += [("all windows together", streaming["overall"]["requests"], streaming["overall"])]
    cells = ((name, number(n), *(number(m[metric]) for metric in METRIC_NAMES)) for name, n, m in rows)
    return f"<p>{_STREAMING}</p>{table(('', 'requests', *METRIC_NAMES), cells)}"


def _windows(windows: Sequence[Mapping[str, Any]], metric: str, word: str) -> str:
    """The differences by tenths of the log."""
    shown = [w for w in windows if w[metric]["baselines"]]
    names = list(shown[0][metric]["baselines"]) if shown else []
    rows = (
        (
            f"{w['first_request']} to {w['last_request']}",
            number(w[metric]["requests"]),
            number(w[metric]["model"]),
            *(f"{b['difference']:+.4f} {_span(b)}" for b in w[metric]["baselines"].values()),
        )
        for w in shown
    )
    head = ("requests", "counted", "model", *(f"minus {name}" for name in names))
    return f"<details><summary>{word} by tenths of the log</summary>{table(head, rows)}</details>"


def _span(difference: Mapping[str, float]) -> str:
    return f"[{difference['low']:+.4f}, {difference['high']:+.4f}]"


def _amount_names(report: Mapping[str, Any]) -> list[str]:
    """The metrics that only amounts have, if a label is one."""
    return ["mae"] if any("mae" in m for m in report["metrics"]["overall"]["tasks"].values()) else []


def _metric_rows(report: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    metrics, names = report["metrics"], (*METRIC_NAMES, *_amount_names(report))
    for when in ("overall", "measured") if metrics["measured"] != metrics["overall"] else ("overall",):
        for k, (task, m) in enumerate(metrics[when]["tasks"].items()):
            yield (
                f"{when}: {task}",
                number(metrics[when]["requests"]),
                *(number(m.get(name)) for name in names),
            )
            for baseline, both in report["baselines"].items() if k == 0 else ():
                m = both[when]
                yield (
                    f"{when}: by {baseline} alone",
                    number(m["requests"]),
                    *(number(m.get(name)) for name in names),
                )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[Row]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """An HTML table; all text is escaped."""
    first = "<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>" if head else ""
    lines = ("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{first}{''.join(lines)}</table>"


def _text(text: str) -> str:
    return html.escape(printable(text))
