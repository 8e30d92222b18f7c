"""Update rules as a schema declares them: `[tables.NAME.rule]`, the rule's name and its own parameters.

A rule is one class here, its kernel one function in `param_server/rules.py`, and nothing else: stacks, segments and the tests
over every rule follow from `RULES`.

Letters: D width of a row, A numbers of state that a rule keeps beside it.
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
    """How gradients change the rows of a table. Its fields are its parameters: numbers that the tables of one stack may set
    differently, given to the kernel as float64 in the order of declaration."""

    name: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def state_width(cls, dim: int) -> int:
        """A, for rows of width `dim`; all tables of a stack have the same, so it may not depend on parameters."""

    @classmethod
    def kept_state(cls, then: int, now: int) -> list[tuple[slice, slice]]:
        """Where numbers of a row's state go when rows of width `then` become `now` wide: (place now, place then) of each run. As
        the kernel lays them; here they begin with the first column's."""
        same = slice(0, cls.state_width(then))
        return [(same, same)]

    @property
    def first_state(self) -> float:
        """What each of the A numbers of a new row is."""
        return 0.0

    @property
    def parameters(self) -> tuple[float, ...]:
        return tuple(float(getattr(self, f.name)) for f in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    """One accumulator an element."""

    name = "adagrad"
    learning_rate: float = setting(0.05, "step size", ge=0, le=1_000_000)
    initial_accumulator: float = setting(
        1e-5,
        "first value of the accumulators; small, as gradients are of the mean loss over a batch",
        ge=0,
        le=1e9,
    )
    epsilon: float = setting(1e-8, "added to the divisor, so that it is never 0", ge=1e-12, le=1)

    @classmethod
    def state_width(cls, dim: int) -> int:
        return dim

    @property
    def first_state(self) -> float:
        return self.initial_accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(Adagrad):
    """One accumulator a row."""

    name = "rowwise_adagrad"

    @classmethod
    def state_width(cls, dim: int) -> int:
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Two averages an element, and a count of the row's own updates: a row that comes seldom is corrected as one that has
    just begun, and doesn't move when it doesn't come."""

    name = "adam"
    learning_rate: float = setting(1e-3, "step size", ge=0, le=1_000_000)
    beta1: float = setting(0.9, "share of the mean gradient that stays at an update", ge=0, le=0.999999)
    beta2: float = setting(
        0.999, "share of the mean squared gradient that stays at an update", ge=0.001, le=0.999999
    )
    epsilon: float = setting(1e-8, "added to the divisor, so that it is never 0", ge=1e-12, le=1)

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
    """The rule of a parsed `[tables.NAME]`, whose keys about it are taken out; `place` is the table's.

    Raises:
        ConfigError: an unknown rule or parameter, or a value outside its range; names key, value, file and line.
    """
    given, flat = table.pop("rule", Adagrad.name), {key: table.pop(key) for key in FLAT if key in table}
    if isinstance(given, Mapping):
        for key, value in flat.items():
            raise ConfigError(
                f"{location.describe(key)}key {location.prefix + key!r}: expected it inside [{location.prefix}rule], where the rule's name is, "
                f"got {value!r} beside it; move it there"
            )
        flat, location = dict(given), location.child("rule")
        given = flat.pop("name", Adagrad.name)
    rule = RULES.get(given) if isinstance(given, str) else None
    if rule is None:
        key = "name" if location.prefix.endswith("rule.") else "rule"
        expected = f"expected one of {', '.join(RULES)}, got {given!r}{nearest(str(given), RULES)}"
        raise ConfigError(f"{location.describe(key)}key {location.prefix + key!r}: {expected}")
    return from_dict(rule, flat, location)


def as_table(rule: Rule) -> dict[str, str | float]:
    """What `take_rule` reads as this rule."""
    return {"name": rule.name, **dataclasses.asdict(rule)}
