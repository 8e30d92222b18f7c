"""A user's model among ours.

Letters: B candidates, T tasks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor

from roostream.errors import ConfigError, RoostreamError
from roostream.models.config import OwnConfig
from roostream.models.inputs import Inputs
from roostream.models.model import Model, Targets
from roostream.models.own.loading import OwnCode, told_of
from roostream.schema.schema import Schema


class OwnModel(Model):
    """Holds what the user's function made; parameters are called `own.…`. What it raises, and what it gives in another shape,
    is a ConfigError with file and line of its code."""

    def __init__(self, code: OwnCode, schema: Schema, config: OwnConfig) -> None:
        """Raises ConfigError: the function raised, or gave something else than a `Model`."""
        super().__init__()
        self._code, self._num_tasks = code, len(schema.tasks)
        with telling(code, code.kind.rpartition(":")[2]):
            own = code.build(schema, config)
        if not isinstance(own, Model):
            raise ConfigError(
                f"model {code.kind!r}: expected a roostream.models.model.Model, got {type(own).__name__} ({code.files[0]}); return one"
            )
        self.own = own

    def forward(self, inputs: Inputs) -> Tensor:
        with telling(self._code, "forward"):
            logits_BT = self.own(inputs)
        self._expect("forward", "logits", logits_BT, (len(inputs.request_index_B), self._num_tasks))
        return logits_BT

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        with telling(self._code, "loss"):
            value = self.own.loss(inputs, logits_BT, targets)
        self._expect("loss", "a scalar", value, ())
        return value

    def _expect(self, method: str, what: str, value: object, shape: tuple[int, ...]) -> None:
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            code = getattr(
                inspect.unwrap(getattr(type(self.own), method)), "__code__", None
            )  # none: it isn't Python's
            where = f"{code.co_filename}:{code.co_firstlineno}" if code else self._code.files[0]
            raise ConfigError(
                f"model {self._code.kind!r}: {where}: expected {method} to give {what} of shape {shape}, got {got}; correct it"
            )


@contextlib.contextmanager
def telling(code: OwnCode, method: str) -> Iterator[None]:
    """What a user's code raises as a sentence; that memory is out stays what it is."""
    try:
        yield
    except (RoostreamError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"model {code.kind!r} failed in {method}: {told_of(error, code.files)}") from None
