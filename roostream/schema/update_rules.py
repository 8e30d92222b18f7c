"""Update rules of embedding tables, declared by `[tables.NAME.rule]` with a name and parameters.

A rule is one class here and one kernel in `param_server/rules.py`; stacks, segments and tests follow from
`RULES`.

Letters: D width of a row, A state numbers per row.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from roostream.errors import ConfigError, nearest
from roostream.schema.settings import Settings, from_dict, setting
from roostream.schema.toml_file import SourceLocation

FLAT = ("learning_rate", "initial_accumulator")
"""Parameters that may also stand in `[tables.NAME]` itself, where `rule` is a name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Settings, abc.ABC):
    """How gradients change the rows of a table. The fields are the parameters, which may differ between
    tables of a stack; the kernel gets them as float64 in the order of declaration."""

    name: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def state_width(cls, dim: int) -> int:
        """A for rows of width `dim`. It may not depend on parameters, since all tables of a stack share
        it."""

    @classmethod
    def kept_state(cls, then: int, now: int) -> list[tuple[slice, slice]]:
        """How the state of a row is copied when its width changes from `then` to `now`: (target, source)
        slices in the kernel's order. By default the state begins with that of the first element."""
        same = slice(0, cls.state_width(then))
        return [(same, same)]

    @property
    def first_state(self) -> float:
        """Initial value of each of the A numbers."""
        return 0.0

    @property
    def parameters(self) -> tuple[float, ...]:
        return tuple(float(getattr(self, f.name)) for f in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    """One accumulator per element."""

    name = "adagrad"
    learning_rate: float = setting(0.05, "step size", ge=0, le=1_000_000)
    initial_accumulator: float = setting(
        1e-5,
        "initial value of the accumulators; small, since gradients are of the mean loss of a batch",
        ge=0,
        le=1e9,
    )
    epsilon: float = setting(1e-8, "added to the divisor", ge=1e-12, le=1)

    @classmethod
    def state_width(cls, dim: int) -> int:
        return dim

    @property
    def first_state(self) -> float:
        return self.initial_accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(Adagrad):
    """One accumulator per row."""

    name = "rowwise_adagrad"

    @classmethod
    def state_width(cls, dim: int) -> int:
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Two averages per element and a count of the row's updates. The bias correction uses the row's own
    count, and a row without a gradient does not change."""

    name = "adam"
    learning_rate: float = setting(1e-3, "step size", ge=0, le=1_000_000)
    beta1: float = setting(0.9, "decay of the mean gradient per update", ge=0, le=0.999999)
    beta2: float = setting(0.999, "decay of the mean squared gradient per update", ge=0.001, le=0.999999)
    epsilon: float = setting(1e-8, "added to the divisor", ge=1e-12, le=1)

    @classmethod
    def state_width(cls, dim: int) -> int:
        return 2 * dim + 1

    @classmethod
    def kept_state(cls, then: int, now: int) -> list[tuple[slice, slice]]:
        """Means, squares, count."""
        squares, count = slice(now, now + then), slice(2 * now, None)
        return [
            (slice(0, then), slice(0, then)),
            (squares, slice(then, 2 * then)),
            (count, slice(2 * then, None)),
        ]


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Adagrad, RowwiseAdagrad, Adam)}


def take_rule(table: dict[str, Any], location: SourceLocation) -> Rule:
    """Remove the rule's keys from a parsed `[tables.NAME]` and return the rule; `location` is the table's.

    Raises:
        ConfigError: an unknown rule or parameter, or a value out of range; names key, value, file and line.
    """
    given, flat = table.pop("rule", Adagrad.name), {key: table.pop(key) for key in FLAT if key in table}
    if isinstance(given, Mapping):
        for key, value in flat.items():
            text = f"expected it in [{location.prefix}rule], got {value!r} outside; move it there"
            raise ConfigError(f"{location.describe(key)}key {location.prefix + key!r}: {text}")
        flat, location = dict(given), location.child("rule")
        given = flat.pop("name", Adagrad.name)
    rule = RULES.get(given) if isinstance(given, str) else None
    if rule is None:
        key = "name" if location.prefix.endswith("rule.") else "rule"
        expected = f"expected one of {', '.join(RULES)}, got {given!r}{nearest(str(given), RULES)}"
        raise ConfigError(f"{location.describe(key)}key {location.prefix + key!r}: {expected}")
    return from_dict(rule, flat, location)


def as_table(rule: Rule) -> dict[str, str | float]:
    """The table that `take_rule` reads as this rule."""
    return {"name": rule.name, **dataclasses.asdict(rule)}
