"""`roostream worker` and `roostream controller`.

Imports are lazy, so that the controller loads neither torch nor numba."""

from __future__ import annotations

from roostream.runtime import program
from trainer.config import ControllerConfig, WorkerConfig


def run_worker(config: WorkerConfig) -> int:
    """Run until a signal. Returns the exit code of `roostream.runtime.program.run`."""

    def body(stop: program.Stop) -> None:
        from trainer.worker_program import run_until_stopped

        run_until_stopped(config, stop)

    return program.run(f"worker {config.index}", body, config.log_format)


def run_controller(config: ControllerConfig) -> int:
    """Run until a signal, or until a newer controller exists. Returns the exit code."""

    def body(stop: program.Stop) -> None:
        from trainer.control.controller_program import run_until_stopped

        run_until_stopped(config, stop)

    return program.run("controller", body, config.log_format)
