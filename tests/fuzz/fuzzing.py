"""`make fuzz`: runs each decoder of tests/fuzz/decoders.py on a million mutated inputs, in its own process.

With atheris installed, code coverage guides the mutations; without it they are random. An input that raises
an undeclared error ends the run of its decoder and is saved in build/fuzz; the exit code is then 1.
`--replay FILE` runs a saved input again.
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

OUTPUT_FOLDER = Path("build") / "fuzz"
MAX_BYTES = 4096
INSTRUMENTED_MODULES = (  # modules without kernels, because numba cannot compile instrumented code
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
    # Fuzz one decoder in this process; without it, each decoder gets a process of its own.
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay is not None:
        return _replay(options.only, options.replay)
    if options.here:
        return _run_one(options.only, options.executions, options.seed)
    return _run_all(options.only, options.executions, options.seed)


def _run_all(prefix: str, executions: int, seed: int) -> int:
    from tests.fuzz.decoders import targets

    OUTPUT_FOLDER.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in (n for n in targets() if n.startswith(prefix)):
        command = [sys.executable, "-m", "tests.fuzz.fuzzing", "--here", "--only", name]
        process = subprocess.run(
            [*command, "--executions", str(executions), "--seed", str(seed)],
            capture_output=True,
            text=True,
            errors="replace",
        )
        output_lines = (process.stdout + process.stderr).splitlines()
        summary = next(
            (line for line in reversed(output_lines) if line.startswith(("Done ", "done "))), "it ended early"
        )
        print(
            f"{name:16} {'ok' if process.returncode == 0 else 'FOUND'}  {summary}",
            flush=True,
        )
        if process.returncode:
            failed.append(name)
            print("\n".join(output_lines[-40:]), flush=True)
    return 1 if failed else 0


def _run_one(name: str, executions: int, seed: int) -> int:
    if importlib.util.find_spec("atheris") is None:
        return _fuzz_randomly(name, executions, seed)
    return _fuzz_with_coverage(name, executions, seed)


def _fuzz_randomly(name: str, executions: int, seed: int) -> int:
    from tests.fuzz.decoders import targets
    from tests.fuzz.mutation import mutate_input

    target, rng, accepted = targets()[name], random.Random(seed), 0
    for _ in range(executions):
        data = rng.choice(target.seeds)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = mutate_input(data, rng)
        try:
            accepted += target.accepts(data)
        except BaseException:
            (OUTPUT_FOLDER / f"{name}-found").write_bytes(data)
            raise
    print(f"done {executions} executions without guidance, {accepted} taken")
    return 0


def _fuzz_with_coverage(name: str, executions: int, seed: int) -> int:
    """Run atheris, which does not return: libFuzzer ends the process."""
    import atheris

    from tests.fuzz.decoders import targets
    from tests.fuzz.mutation import mutate_input

    for function in _functions_of(INSTRUMENTED_MODULES):
        atheris.instrument_func(function)
    target, corpus = targets()[name], OUTPUT_FOLDER / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for n, data in enumerate(target.seeds):
        (corpus / f"seed-{n}").write_bytes(data)

    def atheris_mutator(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutate_input(data, rng)[:max_bytes] if rng.random() < 0.5 else atheris.Mutate(data, max_bytes)

    fuzzer_options = [
        f"-runs={executions}",
        f"-seed={seed}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={OUTPUT_FOLDER / name}-",
    ]
    atheris.Setup(
        [sys.argv[0], *fuzzer_options, "-print_final_stats=1", str(corpus)],
        target.accepts,
        custom_mutator=atheris_mutator,
    )
    atheris.Fuzz()
    return 0


def _functions_of(modules: Iterable[str]) -> Iterator[types.FunctionType]:
    """Yield all functions and methods that these modules define."""
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

    print("taken" if targets()[name].accepts(file.read_bytes()) else "refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
