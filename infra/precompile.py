"""Compile every numba kernel once, so that no program does it while it serves. `python -m infra.precompile`"""

from __future__ import annotations

import importlib
import sys
import time

MODULES = (
    "roostream.wire.decode",
    "roostream.wire.columnar_kernels",
    "roostream.wire.missing_features",
    "roostream.wire.lookup",
    "roostream.wire.transform",
    "roostream.online.counters",
    "param_server.precompile",
    "param_server.replica.row_cache",
    "roostream.models.embedding_ops",
    "roostream.models.attention",
    "roostream.models.fused.forward",
    "trainer.selection.deferral",
    "trainer.selection.slipstream",
    "serving.answer",
    "serving.request_batch",
)


def main() -> int:
    for name in MODULES:
        started_s = time.monotonic()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == name.partition(".")[0]:
                raise
            print(
                f"  {name}: passed over, {error.name} isn't installed", flush=True
            )  # an extra that was left out
            continue
        module.precompile()
        print(f"  {name}: {time.monotonic() - started_s:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
