"""What members have been asked and what they answered: each command is given again until its result is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainer.control.types import Command, Key, MemberState


class CommandResult(NamedTuple):
    """A result that was waited for."""

    kind: str
    result: Mapping[str, Any]


class PendingCommands:
    """Of the members that its owner keeps in `members`. Not thread-safe."""

    def __init__(self, members: Mapping[Key, MemberState], now_s: float) -> None:
        self.members = members
        self.asked_s = now_s  # the last time
        self._waiting: dict[int, Key] = {}
        self._results: dict[tuple[str, Key], dict[str, Any]] = {}
        self._next_id = 0

    def __bool__(self) -> bool:
        """Somebody hasn't answered."""
        return bool(self._waiting)

    def ask(self, kind: str, keys: Iterable[Key], incarnation: int, now_s: float, **arguments: Any) -> None:
        self.asked_s = now_s
        for key in keys:
            self._next_id += 1
            id_ = (incarnation << 32) + self._next_id  # no controller repeats another's ids
            self.members[key].outbox[id_] = {"id": id_, "kind": kind, "incarnation": incarnation, **arguments}
            self._waiting[id_] = key
            self._results.pop((kind, key), None)

    def take(self, key: Key, member: MemberState, result: Mapping[str, Any]) -> CommandResult | None:
        """Note a result; None where it is of an earlier incarnation, or given twice."""
        command = member.outbox.pop(result.get("id", 0), None)
        if command is None or self._waiting.pop(command["id"], None) is None:
            return None
        if result.get("ok"):
            self._results[command["kind"], key] = {k: v for k, v in result.items() if k not in ("id", "ok")}
        return CommandResult(command["kind"], result)

    def commands(self, key: Key) -> list[Command]:
        """What `key` has not answered, oldest first."""
        member = self.members.get(key)
        return list(member.outbox.values()) if member else []

    def answers(self, kind: str, keys: Iterable[Key]) -> list[dict[str, Any]]:
        """The results of those that have all answered."""
        return [self._results[kind, key] for key in keys]

    def late(self) -> str:
        """Who hasn't answered."""
        return ", ".join(sorted({str(key) for key in self._waiting.values()}))

    def clear(self) -> None:
        """Nothing that was asked is wanted any more."""
        self._waiting.clear()
        self._results.clear()
        for member in self.members.values():
            member.outbox.clear()
