"""The instructions of a Dockerfile, as far as ours is written: stages, continued lines, comments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`word` in capitals; `text` without continuations; `stage` is the name behind the last FROM's AS."""

    word: str
    text: str
    stage: str

    @property
    def flags(self) -> dict[str, str]:
        """`--name=value` in front."""
        return dict(re.findall(r"--([\w-]+)=(\S+)", re.match(r"(--\S+\s+)*", self.text)[0]))  # type: ignore[index]

    @property
    def body(self) -> str:
        return re.sub(r"^(--\S+\s+)*", "", self.text)


def read(path: Path) -> list[Instruction]:
    """Raises ValueError: a line is no instruction."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")
    ]
    found: list[Instruction] = []
    stage = ""
    for text in re.split(r"(?<!\\)\n", "\n".join(lines)):
        if not text.strip():
            continue
        word, _, rest = re.sub(r"\s*\\\n\s*", " ", text).strip().partition(" ")
        if not re.fullmatch(r"FROM|COPY|RUN|ENV|WORKDIR|USER|ENTRYPOINT", word):
            raise ValueError(f"expected an instruction, got {text!r}")
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append(Instruction(word, rest, stage))
    return found
