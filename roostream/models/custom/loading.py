"""From `shop.py:build` to the code behind it, under a name that is nobody else's.

A file is loaded from the very bytes that were hashed, as a module of a private name: it may be called like one of our
folders. A package's module keeps its name, so that it can import its neighbours; that name must not be one of ours (decision
0021). What was loaded is found again by name and digest: a manifest's configuration gets the code that it was trained with or
none, and what a manifest says never makes a process import anything.

A user's model among ours.

Letters: B candidates, T tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roostream.errors import ConfigError, RoostreamError
from roostream.models.config import CustomModelConfig
from roostream.models.inputs import Inputs
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema

OUR_NAMES = frozenset({"roostream", "joiner", "trainer", "param_server", "serving", "infra"})
_FORM = "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
_SHOWN = 12  # hex digits of a digest


class CustomCode(NamedTuple):
    """A user's module."""

    kind: str  # as manifests name it: without the folder, which differs from machine to machine
    digest: str  # sha256 of its source, hex
    files: tuple[str, ...]  # that were hashed
    config: type[CustomModelConfig]
    build: Callable[[Schema, Any], Any]  # the second is a `config`


class _Hashed(NamedTuple):
    files: tuple[str, ...]
    digest: str
    module: Callable[[], ModuleType]


_LOADED: dict[tuple[str, str], CustomCode] = {}  # by kind and digest; a process has one or two


def is_custom(kind: object) -> bool:
    return isinstance(kind, str) and ":" in kind


def load_custom_code(kind: str, folder: Path, code: str = "") -> CustomCode:
    """The code that `kind` names, a file from `folder`; loaded once a process as long as it doesn't change.

    Raises:
        ConfigError: absent, not importable (with the file and line that failed), without the function, or not the code of
            digest `code`, if one is given.
    """
    name, _, function = kind.rpartition(":")
    if not function.isidentifier() or not name:
        raise ConfigError(f"key 'kind': expected {_FORM}, got {kind!r}")
    is_file = name.endswith(".py")
    source = _of_file(folder / name) if is_file else _of_package(name, kind)
    shown = f"{Path(name).name}:{function}" if is_file else kind
    if code and code != source.digest:
        raise _other_code(shown, code, source.digest, source.files[0])
    if (shown, source.digest) not in _LOADED:
        try:
            module = source.module()
        except Exception as error:
            raise ConfigError(
                f"model {shown!r} can't be imported: {describe_error(error, source.files)}"
            ) from None
        config, build = _parts(module, shown, function, source.files[0])
        _LOADED[shown, source.digest] = CustomCode(shown, source.digest, source.files, config, build)
    found = _LOADED[shown, source.digest] = _LOADED.pop((shown, source.digest))  # the newest is the last
    return found


def loaded_code(config: Mapping[str, Any]) -> CustomCode:
    """The code of a configuration as a manifest keeps it.

    Raises:
        ConfigError: this process wasn't given that code.
    """
    kind, code = str(config["kind"]), str(config.get("code", ""))
    if found := _LOADED.get((kind, code)):
        return found
    others = [own for (name, _), own in _LOADED.items() if name == kind]
    if others:
        raise _other_code(kind, code, others[-1].digest, others[-1].files[0])
    raise ConfigError(
        f"model {kind!r}: expected its code (digest {code[:_SHOWN]}), got none; set `model` here to a TOML with that kind"
    )


def describe_error(error: BaseException, files: tuple[str, ...]) -> str:
    """`shop.py:12: ValueError: …`, on one line: the innermost place in `files` that the error came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    where = f"{places[-1].filename}:{places[-1].lineno}: " if places else ""
    kind = "" if isinstance(error, RoostreamError) else f"{type(error).__name__}: "
    return f"{where}{kind}{' '.join(str(error).split())}"


def _other_code(kind: str, expected: str, got: str, file: str) -> ConfigError:
    return ConfigError(
        f"model {kind!r}: expected code of digest {expected[:_SHOWN]}, got {got[:_SHOWN]} ({file}); "
        "use the file that it was trained with, or begin anew with another store"
    )


class _AsHashed(SourceFileLoader):
    """Runs the bytes that were hashed, never what an earlier run has left compiled."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: Any) -> bytes:
        return self._source

    def path_stats(self, path: Any) -> Any:
        raise OSError("nothing is cached")


def _of_file(path: Path) -> _Hashed:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model {str(path)!r} can't be read: expected a Python file, got {error.strerror}"
        ) from None
    digest, file = hashlib.sha256(source).hexdigest(), str(path.resolve())
    name = f"_roostream_own_{digest[:16]}"

    def module() -> ModuleType:
        spec = ModuleSpec(name, _AsHashed(name, file, source), origin=file)
        spec.has_location = True
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made  # dataclasses look their module up there
        try:
            spec.loader.exec_module(made)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[name]
            raise
        return made

    return _Hashed((file,), digest, module)


def _of_package(name: str, kind: str) -> _Hashed:
    """The digest is of all Python files of the outermost package, or of the one file of a module without one."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"key 'kind': expected {_FORM}, got {kind!r}")
    top = name.partition(".")[0]
    if top in OUR_NAMES or top in sys.stdlib_module_names:
        raise ConfigError(
            f"model {kind!r}: expected a package of a name of its own, got {top!r}, which is taken; rename it"
        )
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {kind!r}: expected package {top!r} in this environment, got none; install it with Roostream"
        )
    origin = Path(spec.origin).resolve()
    root = origin.parent
    files = sorted(root.rglob("*.py")) if spec.submodule_search_locations else [origin]
    hashed = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        hashed.update(f"{file.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return _Hashed((str(origin), *map(str, files)), hashed.hexdigest(), lambda: importlib.import_module(name))


def _parts(
    module: ModuleType, kind: str, function: str, file: str
) -> tuple[type[CustomModelConfig], Callable[[Schema, Any], Any]]:
    build, config = getattr(module, function, None), getattr(module, "Config", CustomModelConfig)
    if not callable(build):
        raise ConfigError(
            f"model {kind!r}: expected a function {function}(schema, config) in {file}, got none; define it"
        )
    is_config = (
        isinstance(config, type)
        and issubclass(config, CustomModelConfig)
        and "__dataclass_fields__" in vars(config)
    )
    if not is_config:
        base = f"{CustomModelConfig.__module__}.{CustomModelConfig.__qualname__}"
        raise ConfigError(
            f"model {kind!r}: expected Config as a frozen dataclass that extends {base}, got {config!r} in {file}; "
            f"write @dataclass(frozen=True, kw_only=True) class Config({CustomModelConfig.__name__})"
        )
    return config, build


class CustomModel(Model):
    """Holds what the user's function made; parameters are called `own.…`. What it raises, and what it gives in another shape,
    is a ConfigError with file and line of its code."""

    def __init__(self, code: CustomCode, schema: Schema, config: CustomModelConfig) -> None:
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
def telling(code: CustomCode, method: str) -> Iterator[None]:
    """What a user's code raises as a sentence; that memory is out stays what it is."""
    try:
        yield
    except (RoostreamError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"model {code.kind!r} failed in {method}: {describe_error(error, code.files)}"
        ) from None
