"""`make fuzz`: runs each decoder of tests/fuzz/decoders.py on a million mutated inputs, in its own process.

With atheris installed, code coverage guides the mutations; without it they are random. An input that raises
an undeclared error ends its run and is saved in build/fuzz; `--replay FILE` runs it again. The exit code is
then 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

FOUND = Path("build") / "fuzz"
MAX_BYTES = 4096
GUIDING = (  # without kernels: numba can only compile uninstrumented code
    "roostream.wire.records",
    "roostream.runtime.manifest",
    "serving.access.bearer_keys",
    "serving.feature_log.format",
    "serving.rank_protobuf",
    "serving.http.engagements",
    "serving.rank_json",
    "serving.http.routes",
    "serving.http.retrieval_routes",
    "serving.oip.features",
    "serving.oip.tensors",
    "serving.request",
    "serving.retrieval.catalogue",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executions", type=int, default=1_000_000, help="executions of each decoder")
    parser.add_argument("--only", default="", help="name of a decoder, or its beginning")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--replay", type=Path, help="run a saved input; --only must be the full name of its decoder"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    given = parser.parse_args()
    if given.replay is not None:
        return _replay(given.only, given.replay)
    if given.here:
        return _run_one(given.only, given.executions, given.seed)
    return _run_all(given.only, given.executions, given.seed)


def _run_all(only: str, executions: int, seed: int) -> int:
    from tests.fuzz.decoders import targets

    FOUND.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in (n for n in targets() if n.startswith(only)):
        command = [sys.executable, "-m", "tests.fuzz.fuzzing", "--here", "--only", name]
        done = subprocess.run(
            [*command, "--executions", str(executions), "--seed", str(seed)],
            capture_output=True,
            text=True,
            errors="replace",
        )
        said = (done.stdout + done.stderr).splitlines()
        told = next(
            (line for line in reversed(said) if line.startswith(("Done ", "done "))), "it ended early"
        )
        print(
            f"{name:16} {'ok' if done.returncode == 0 else 'FOUND'}  {told}",
            flush=True,
        )
        if done.returncode:
            failed.append(name)
            print("\n".join(said[-40:]), flush=True)
    return 1 if failed else 0


def _run_one(name: str, executions: int, seed: int) -> int:
    if importlib.util.find_spec("atheris") is None:
        return _blind(name, executions, seed)
    return _guided(name, executions, seed)


def _blind(name: str, executions: int, seed: int) -> int:
    from tests.fuzz.decoders import targets
    from tests.fuzz.mutation import mutated

    target, rng, taken = targets()[name], random.Random(seed), 0
    for _ in range(executions):
        data = rng.choice(target.seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = mutated(data, rng)
        try:
            taken += target.try_one(data)
        except BaseException:
            (FOUND / f"{name}-found").write_bytes(data)
            raise
    print(f"done {executions} executions without guidance, {taken} taken")
    return 0


def _guided(name: str, executions: int, seed: int) -> int:
    """Does not return: libFuzzer ends the process."""
    import atheris

    from tests.fuzz.decoders import targets
    from tests.fuzz.mutation import mutated

    for function in _functions(GUIDING):
        atheris.instrument_func(function)
    target, corpus = targets()[name], FOUND / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for n, data in enumerate(target.seeds):
        (corpus / f"seed-{n}").write_bytes(data)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutated(data, rng)[:max_bytes] if rng.random() < 0.5 else atheris.Mutate(data, max_bytes)

    options = [
        f"-runs={executions}",
        f"-seed={seed}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={FOUND / name}-",
    ]
    atheris.Setup(
        [sys.argv[0], *options, "-print_final_stats=1", str(corpus)], target.try_one, custom_mutator=mutate
    )
    atheris.Fuzz()
    return 0


def _functions(modules: Iterable[str]) -> Iterator[types.FunctionType]:
    """All functions and methods of these modules."""
    for name in modules:
        module = importlib.import_module(name)
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name)]
        for value in (value for owner in owners for value in vars(owner).values()):
            if (
                isinstance(value, types.FunctionType)
                and value.__module__ == name
                and value.__code__.co_filename != "<string>"
            ):
                yield value


def _replay(name: str, file: Path) -> int:
    from tests.fuzz.decoders import targets

    print("taken" if targets()[name].try_one(file.read_bytes()) else "refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
