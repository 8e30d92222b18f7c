"""A reader of Dockerfiles in the style of this project: stages, continued lines and comments."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`keyword` in capitals, `text` without line continuations, and `stage`: the name after AS of the latest
    FROM."""

    keyword: str
    text: str
    stage: str

    @property
    def flags(self) -> dict[str, str]:
        """The options `--name=value` before the text."""
        return dict(re.findall(r"--([\w-]+)=(\S+)", re.match(r"(--\S+\s+)*", self.text)[0]))  # type: ignore[index]

    @property
    def body(self) -> str:
        return re.sub(r"^(--\S+\s+)*", "", self.text)


def read(path: Path) -> list[Instruction]:
    """Read the instructions. Raises ValueError if a line is no instruction."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")
    ]
    found: list[Instruction] = []
    stage = ""
    for text in re.split(r"(?<!\\)\n", "\n".join(lines)):
        if not text.strip():
            continue
        keyword, _, rest = re.sub(r"\s*\\\n\s*", " ", text).strip().partition(" ")
        if not re.fullmatch(r"FROM|COPY|RUN|ENV|WORKDIR|USER|ENTRYPOINT", keyword):
            raise ValueError(f"expected an instruction, got {text!r}")
        if keyword == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append(Instruction(keyword, rest, stage))
    return found
