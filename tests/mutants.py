"""`make mutants`: break the core files at random places, one place a time, and see whether a test notices.

A mutant is one change of a file's syntax tree: a comparison or an operator turned, a condition negated, a number moved by one, a
statement left out. It is written into a copy of the tree, and those tests of the file's room that run the changed line
(tests/covering.py) run there, the ones named like the file first, until one fails. What no test notices is printed with its
place: either a test is missing or the change means nothing.

Left alone: texts, annotations, assertions (`zip`'s `strict` is one), log lines, what is raised, and compiled kernels (a change of
one that is inlined in another is not compiled anew; tests/roo and tests/param_server hold them against plain Python) and what
compiles them ahead. Which are
tried depends on the seed and on the changed lines alone, so that a commit elsewhere leaves the choice as it was. Exit code 1: too
many survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.covering import USUAL, Covering, statement_lines

_NEARER = 0.1  # of its time counts, for a test that is named like the file
MOST_NAMED = 400  # tests on one command line; their files follow whole
_PARSING = threading.Lock()  # two threads that build syntax trees at once are a SystemError of CPython 3.11
ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = ROOT / "tests" / "mutants_explained.toml"
CORE = {
    "joiner": (
        "join",
        "passage",
        "rules",
        "fold",
        "turn",
        "entries",
        "scopes",
        "build",
        "ingest",
        "local_engine",
        "local_watermark",
    ),
    "roo": (
        "decode",
        "ids",
        "schema",
        "transform",
        "online/counters",
        "online/entity_state",
        "online/event_rows",
        "lookup",
        "batch",
        "jagged",
        "wire",
    ),
    "trainer": (
        "loop",
        "control/coordinator",
        "dedupe",
        "partitions",
        "monitoring/quality",
        "monitoring/caught_up",
        "monitoring/partition_watch",
        "monitoring/rates",
        "control/protocol",
        "worker",
        "dense_part/adam",
        "dense_part/weight_average",
        "dense_part/dense_file",
        "selection/rehearsal",
        "selection/decision",
        "selection/deferral",
        "selection/row_numbers",
        "selection/outcomes",
        "selection/selection",
        "selection/slipstream",
        "selection/slipstream_course",
        "predictions",
    ),
    "param_server": (
        "table",
        "segments",
        "residency",
        "replica/replica",
        "replica/slots",
        "deltas",
        "server",
        "outbox",
        "publish",
        "restore",
        "blobs",
    ),
    "placement": ("bucket_moves", "cost", "plan", "profile", "profiles", "sharding_file"),
    "runtime": ("manifest", "checkpoint_store", "backoff", "member", "kafka/merge", "kafka/reader", "frames", "transport"),
}
_TURNED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: `nth` of those that `places` yields for the file."""

    file: str
    nth: int
    line: int
    was: str
    now: str


_LEFT_ALONE = ("annotation", "returns", "decorator_list", "type_params", "bases", "defaults", "kw_defaults")
_OF_CLASSES = "keywords"  # how a class is stored, not what it means


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and any(
        {"njit", "kernel"} & set(re.findall(r"\w+", ast.unparse(d))) for d in node.decorator_list
    ):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("warm", "_warm"):
        return True  # compiles ahead what the first call would
    if isinstance(node, ast.If) and ("TYPE_CHECKING" in ast.unparse(node.test) or "__main__" in ast.unparse(node.test)):
        return True
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("log.", "logging.", "TypeVar", "setting"))


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node can become."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in _TURNED:
        new.ops = [_TURNED[type(new.ops[0])]()]
        yield new
    elif isinstance(new, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(new.op) in _TURNED:
        new.op = _TURNED[type(new.op)]()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield new.operand
    elif isinstance(new, ast.Constant) and type(new.value) in (int, bool):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
        yield new
    elif isinstance(new, (ast.If, ast.While, ast.IfExp)):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield new
    left_out = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stores = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    if left_out or stores or isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)):
        yield ast.Pass()


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """(parent, field, index in it, what the node there becomes), always in the same order."""
    for field, value in ast.iter_fields(tree):
        if field in _LEFT_ALONE or (field == _OF_CLASSES and isinstance(tree, ast.ClassDef)):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            for new in _changes(child):
                yield tree, field, index, new
            yield from places(child)


def mutants_of(file: str) -> list[Mutant]:
    found = []
    for nth, (parent, field, index, new) in enumerate(places(ast.parse((ROOT / file).read_text()))):
        old = getattr(parent, field) if index is None else getattr(parent, field)[index]
        texts = [ast.unparse(ast.fix_missing_locations(n)).split("\n")[0][:90] for n in (old, new)]
        found.append(Mutant(file, nth, old.lineno, *texts))
    return found


def mutated(mutant: Mutant) -> str:
    """The file's text with the change."""
    tree = ast.parse((ROOT / mutant.file).read_text())
    for nth, (parent, field, index, new) in enumerate(places(tree)):
        if nth == mutant.nth:
            if index is None:
                setattr(parent, field, new)
            else:
                getattr(parent, field)[index] = new
            return ast.unparse(ast.fix_missing_locations(tree))
    raise AssertionError(mutant)


def explained() -> dict[tuple[str, str, str], str]:
    """(file, its line without indentation, what it becomes) → why no test can notice."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["mutant"]
    return {(entry["file"], entry["line"], entry["now"]): entry["why"] for entry in entries}


def place_of(mutant: Mutant) -> tuple[str, str, str]:
    """What `explained` knows it by: line numbers move."""
    return mutant.file, (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip(), mutant.now


def chosen_of(pool: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of them, in an order that only the seed and what each changes decide; of equal changes each has its turn."""
    seen: Counter[tuple[object, ...]] = Counter()
    ranked = []
    for mutant in pool:
        change = (*place_of(mutant), mutant.was)
        ranked.append((hashlib.sha256(repr((seed, change, seen[change])).encode()).digest(), mutant))
        seen[change] += 1
    return [mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0])[:count]]


class Copy:
    """A copy of the tree to break."""

    def __init__(self, home: Path) -> None:
        self.home = home
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, home / name)
        for name in (".venv", ".tools", "build"):
            if (ROOT / name).exists() and not (home / name).exists():
                (home / name).symlink_to(ROOT / name)

    def survives(self, mutant: Mutant, covering: Covering, limit_s: float) -> bool:
        """Whether every test that runs the changed line passes in time with the change in place."""
        path = self.home / mutant.file
        whole = path.read_text()
        with _PARSING:
            tests, broken = covering.tests_of(mutant.file, statement_lines(ast.parse(whole), mutant.line)), mutated(mutant)
        path.write_text(broken)
        try:
            return all(self.passes(some, limit_s) for some in self._in_order(mutant.file, covering, tests))
        finally:
            path.write_text(whole)

    def _in_order(self, file: str, covering: Covering, tests: list[str] | None) -> list[list[str]]:
        """The tests themselves, the quick ones and those named like the file first; then the others of their files, which may
        share what a fixture did. All of the room if None."""
        room, stem = file.split("/")[0], Path(file).stem

        def cost_s(test: str) -> float:
            return covering.took_s(test) * (_NEARER if stem in Path(test.split("::")[0]).stem else 1.0)

        if tests is None:
            names = (str(name.relative_to(self.home)) for name in (self.home / "tests" / room).rglob("test_*.py"))
            return [sorted(names, key=cost_s)]
        nearest = sorted(tests, key=cost_s)
        files = list(dict.fromkeys(t.split("::")[0] for t in nearest))
        return [nearest[:MOST_NAMED], files] if tests else []

    def passes(self, tests: list[str], limit_s: float) -> bool:
        """Whether these tests pass, in this order."""
        env = os.environ | {"PYTHONPATH": str(self.home), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        quick = ("-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:anyio")  # half of a start is theirs
        command = [sys.executable, "-m", "pytest", "-x", "-q", *quick, "-m", USUAL]
        try:
            ran = subprocess.run([*command, *tests], cwd=self.home, env=env, capture_output=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return False
        return ran.returncode == 0


def fingerprint() -> str:
    """Of every file that the copies have."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for name in filter(None, names.split("\0")):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def measured(home: Path, rooms: list[str], folder: Path) -> dict[str, Covering]:
    """What each room's tests run, of this tree; what an earlier run left in `folder` is used again."""
    tree, found = fingerprint(), {}
    for room in rooms:
        data, done = folder / f"{room}-{tree}.coverage", folder / f"{room}-{tree}.done"
        found[room] = Covering(home, room, data, measure=not done.exists())
        done.touch()
    return found


class Outcomes:
    """What became of each mutant, written down after each; one that an earlier run killed is not tried again."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self.survived: dict[Mutant, bool] = {}
        for entry in json.loads(path.read_text()) if path and path.exists() else []:
            survived = entry.pop("survived")
            self.survived[Mutant(**entry)] = survived

    def add(self, mutant: Mutant, survived: bool) -> None:
        with self._lock:
            self.survived[mutant] = survived
            if self._path:
                self._path.write_text(json.dumps([asdict(m) | {"survived": s} for m, s in self.survived.items()], indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="files whose path begins so")
    parser.add_argument("--least", type=float, default=0.95, help="share that has to be killed")
    parser.add_argument("--json", type=Path, help="where the outcome of each goes; those killed there are not tried again")
    parser.add_argument("--home", type=Path, help="where copies and measurements lie and stay, for another run; else nowhere")
    options = parser.parse_args()
    files = [f"{room}/{stem}.py" for room, stems in CORE.items() for stem in stems]
    pool = [mutant for file in files if file.startswith(options.only) for mutant in mutants_of(file)]
    chosen = chosen_of(pool, options.count, options.seed)
    print(f"{len(chosen)} of {len(pool)} changes, seed {options.seed}", flush=True)
    outcomes, known = Outcomes(options.json), explained()
    left = [mutant for mutant in chosen if outcomes.survived.get(mutant, True)]
    with contextlib.ExitStack() as stack:
        folder = options.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        ready = [Copy(folder.resolve() / str(n)) for n in range(options.jobs)]
        taken, own = iter(ready), threading.local()
        rooms = sorted({mutant.file.split("/")[0] for mutant in left})
        began = time.monotonic()
        covering = measured(ready[0].home, rooms, folder)
        limit_s = 600 + 2 * (time.monotonic() - began)

        def one(mutant: Mutant) -> None:
            if not hasattr(own, "copy"):
                own.copy = next(taken)
            survived = own.copy.survives(mutant, covering[mutant.file.split("/")[0]], limit_s)
            outcomes.add(mutant, survived)
            if survived:
                why = known.get(place_of(mutant), "")
                said = f"explained, {why}" if why else "survived"
                print(f"{said}: {mutant.file}:{mutant.line}: {mutant.was}  →  {mutant.now}", flush=True)

        with ThreadPoolExecutor(options.jobs) as crew:
            list(crew.map(one, left))
    num_killed = sum(not outcomes.survived[mutant] for mutant in chosen)
    num_explained = sum(outcomes.survived[mutant] and place_of(mutant) in known for mutant in chosen)
    print(f"{num_killed} of {len(chosen)} killed, {num_explained} explained")
    return 0 if num_killed >= options.least * (len(chosen) - num_explained) else 1


if __name__ == "__main__":
    sys.exit(main())
