"""Compile numba kernels into numba's on-disk cache, so that no program compiles while it serves.

`python -m infra.precompile [GROUP…]`; without arguments all groups, one after the other, which gives equal
files with equal sources, `PYTHONHASHSEED` and times of the sources: images are built so. `infra/prepare.py`
runs the groups in parallel.
"""

from __future__ import annotations

import importlib
import sys
import time
import zlib

EARLY_GROUPS = ("decode", "rows", "wire")
"""Groups that need only the packages of `infra/setup.sh`'s first step, so they can run while the others are
downloaded."""
# Each group is compiled by a process of its own; all take about as long.
GROUPS = {
    "decode": ("roostream.wire.decode",),
    "rows": ("param_server.precompile", "param_server.replica.row_cache"),
    "wire": (
        "roostream.wire.dedup",
        "roostream.wire.columnar",
        "roostream.wire.missing_features",
        "roostream.wire.lookup",
        "roostream.wire.transform",
        "roostream.online.counters",
        "serving.request_batch",
    ),
    "models": (
        "roostream.models.embedding_ops",
        "roostream.models.attention",
        "roostream.models.compiled.scorer",
        "serving.answer",
    ),
    "selection": ("trainer.selection.deferral", "trainer.selection.slipstream"),
}
PROGRAMS = (
    "trainer.worker_program",
    "serving.http.app",
    "joiner.flink_job",
    "roostream.warehouse.archiver_program",
)


def main(groups: tuple[str, ...]) -> int:
    """Compile the kernels of these groups, () = of all; return the exit code."""
    for group in groups or tuple(GROUPS):
        for name in GROUPS[group]:
            started_s = time.monotonic()
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if group in EARLY_GROUPS or not _is_extra(error, name):
                    raise
                print(f"  {name}: skipped, {error.name} is not installed", flush=True)
                continue
            module.precompile()
            print(f"  {name}: {time.monotonic() - started_s:.1f} s", flush=True)
    return 0


def keep_addresses_out_of_kernels() -> None:
    """Make numba write the same files in every process, so that two builds of an image are equal.

    Numba writes addresses of the process at two places: in a listing of types for people, which is left
    empty here, and in the name of each array expression, which is made from its place in the source here."""
    import numba.np.ufunc.array_exprs as array_exprs
    from numba.core.annotations.type_annotations import TypeAnnotation

    TypeAnnotation.__str__ = lambda self: ""
    array_exprs.hash = lambda expression: zlib.crc32(str(expression.loc).encode())  # shadows the built-in


def import_programs() -> None:
    """Import the largest programs once, which writes their byte code before many processes need it at the
    same time."""
    for name in PROGRAMS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not _is_extra(error, name):
                raise


def _is_extra(error: ModuleNotFoundError, name: str) -> bool:
    """Whether the import of our module `name` failed because a package of an extra is not installed."""
    return error.name is not None and error.name.partition(".")[0] != name.partition(".")[0]


if __name__ == "__main__":
    keep_addresses_out_of_kernels()
    sys.exit(main(tuple(sys.argv[1:])))
