"""Load a user's model from `shop.py:build` or `shop.models:build`, and wrap it.

A file is executed from the bytes that were hashed, as a module with a private name, so it may have any file
name. A module of a package keeps its name, so it can import its neighbors; names of this project's packages
are rejected. Loaded code is found by name and digest: a manifest gets the code that it was trained with, code
that says it `replaces` this one, or none, and never causes an import.

Letters: B candidates, T tasks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from roostream.errors import ConfigError, RoostreamError
from roostream.models.config import CustomModelConfig
from roostream.models.inputs import Inputs
from roostream.models.model import Model, Targets
from roostream.models.named_columns import ColumnNames, with_prefix, wrong_names
from roostream.schema.schema import Schema

OUR_NAMES = frozenset({"roostream", "joiner", "trainer", "param_server", "serving", "infra"})
_FORM = "FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
_SHOWN = 12  # hex digits of a digest
_TORCHREC_COLLECTIONS = {
    f"torchrec.modules.embedding_modules.{name}" for name in ("EmbeddingBagCollection", "EmbeddingCollection")
}
_DIGEST = re.compile(f"[0-9a-f]{{{_SHOWN},64}}")


class CustomCode(NamedTuple):
    """A loaded custom model."""

    kind: str  # as manifests name it: without the folder, which differs from machine to machine
    digest: str  # sha256 of its source, hex
    files: tuple[str, ...]  # that were hashed
    config: type[CustomModelConfig]
    build: Callable[[Schema, Any], Any]  # the second is a `config`
    replaces: tuple[str, ...] = ()  # first digits of the digests of code whose commits this code continues


class _Hashed(NamedTuple):
    files: tuple[str, ...]
    digest: str
    module: Callable[[], ModuleType]


_TORCH_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default device": (torch.get_default_device, torch.set_default_device),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "use of deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "detection of anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
}
"""Settings of torch for the whole process: how each is read and set."""

_LOADED: dict[tuple[str, str], CustomCode] = {}  # by kind and digest; a process has one or two


def is_custom(kind: object) -> bool:
    """Whether `kind` names code of the user, as "module:function" or "file.py:function"."""
    return isinstance(kind, str) and ":" in kind


def load_custom_code(kind: str, folder: Path, code: str = "", replaces: Any = ()) -> CustomCode:
    """Load the code that `kind` names, files relative to `folder`. Loaded once per process unless it changes.

    Raises:
        ConfigError: missing, not importable (names file and line), without the function, its digest is not
        `code`, or `replaces` has no digests.
    """
    if not isinstance(replaces, list | tuple) or not all(_DIGEST.fullmatch(str(one)) for one in replaces):
        raise ConfigError(
            f"key 'replaces': expected a list of digests of {_SHOWN} or more hex digits, got {replaces!r}"
        )
    name, _, function = kind.rpartition(":")
    if not function.isidentifier() or not name:
        raise ConfigError(f"key 'kind': expected {_FORM}, got {kind!r}")
    is_file = name.endswith(".py")
    hashed_source = _hash_file(folder / name) if is_file else _hash_package(name, kind)
    kind_name = f"{Path(name).name}:{function}" if is_file else kind
    if code and code != hashed_source.digest:
        found_code = _expected_code(code, hashed_source.digest, hashed_source.files[0])
        raise ConfigError(
            f"model {kind_name!r}: {found_code}; use the file with that digest, or correct the key 'code'"
        )
    if (kind_name, hashed_source.digest) not in _LOADED:
        try:
            with _torch_settings_kept():
                module = hashed_source.module()
        except (Exception, SystemExit) as error:
            advice = _import_advice(error, folder / Path(name).parent if is_file else None)
            raise ConfigError(
                f"model {kind_name!r} can't be imported: {describe_error(error, hashed_source.files)}{advice}"
            ) from None
        config, build = _config_and_build(module, kind_name, function, hashed_source.files[0])
        _LOADED[kind_name, hashed_source.digest] = CustomCode(
            kind_name, hashed_source.digest, hashed_source.files, config, build
        )
    # Moved to the end: the newest is the last.
    found = _LOADED.pop((kind_name, hashed_source.digest))._replace(replaces=tuple(replaces))
    _LOADED[kind_name, hashed_source.digest] = found
    return found


def loaded_code(config: Mapping[str, Any]) -> CustomCode:
    """The loaded code of a configuration from a manifest, or the newest one that replaces it.

    Raises:
        ConfigError: this process has not loaded that code.
    """
    kind, code = str(config["kind"]), str(config.get("code", ""))
    if found := _LOADED.get((kind, code)):
        return found
    others = [own for (name, _), own in _LOADED.items() if name == kind]
    for other in reversed(others):
        if any(code.startswith(digest) for digest in other.replaces):
            return other
    if others:
        found_code = _expected_code(code, others[-1].digest, others[-1].files[0])
        raise ConfigError(
            f"model {kind!r}: {found_code}; use the file that it was trained with, or let this one continue "
            f'its commits: in the model\'s TOML, replaces = ["{code[:_SHOWN]}"]'
        )
    raise ConfigError(
        f"model {kind!r}: expected its code (digest {code[:_SHOWN]}), got none; set `model` here to a TOML "
        "with that kind"
    )


def describe_error(error: BaseException, files: tuple[str, ...]) -> str:
    """`shop.py:12: ValueError: …`, on one line, with the innermost location in `files`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    where = f"{places[-1].filename}:{places[-1].lineno}: " if places else ""
    kind = "" if isinstance(error, RoostreamError) else f"{type(error).__name__}: "
    return f"{where}{kind}{' '.join(str(error).split())}".removesuffix(": ").removesuffix(".")


def _import_advice(error: BaseException, folder: Path | None) -> str:
    """What to do after a failed import; "" if the error says it. `folder`: of a file, whose neighbors are not
    imported."""
    if isinstance(error, RoostreamError):
        return ""
    if not isinstance(error, ImportError):
        exits = isinstance(error, SystemExit)
        return f"; {'an import may only define names' if exits else 'correct its code'}"
    top = (error.name or "").partition(".")[0]
    beside = folder is not None and top and any(p.exists() for p in (folder / f"{top}.py", folder / top))
    if folder is not None and (beside or "relative import" in str(error)):
        return (
            "; a model of several files is an installed package, kind = 'PACKAGE.MODULE:FUNCTION', because "
            "the digest of a file covers only this file"
        )
    return f"; install {top!r} for worker and serving" if isinstance(error, ModuleNotFoundError) else ""


@contextlib.contextmanager
def _torch_settings_kept(where: str = "") -> Iterator[None]:
    """Restore torch's settings for the whole process. Raises ConfigError: the code inside, which is at
    `where`, changed one."""
    before = {name: get() for name, (get, _) in _TORCH_SETTINGS.items()}
    changed: dict[str, Any] = {}
    try:
        yield
    finally:
        for name, (get, set_to) in _TORCH_SETTINGS.items():
            if (value := get()) != before[name]:
                changed[name] = value
                set_to(before[name])
    for name, value in changed.items():
        raise ConfigError(
            f"{where}expected torch's {name} to stay {before[name]}, as it holds for the whole process, got "
            f"{value}; leave it out"
        )


def _expected_code(expected: str, got: str, file: str) -> str:
    return f"expected code of digest {expected[:_SHOWN]}, got {got[:_SHOWN]} ({file})"


class _AsHashed(SourceFileLoader):
    """Executes the bytes that were hashed, never a cached compilation."""

    def __init__(self, name: str, path: str, hashed_source: bytes) -> None:
        super().__init__(name, path)
        self._source = hashed_source

    def get_data(self, path: Any) -> bytes:
        return self._source

    def path_stats(self, path: Any) -> Any:
        raise OSError("nothing is cached")


def _hash_file(path: Path) -> _Hashed:
    try:
        hashed_source = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"model {str(path)!r} can't be read: expected a Python file, got {error.strerror}"
        ) from None
    digest, file = hashlib.sha256(hashed_source).hexdigest(), str(path.resolve())
    name = f"_roostream_own_{digest[:16]}"

    def module() -> ModuleType:
        spec = ModuleSpec(name, _AsHashed(name, file, hashed_source), origin=file)
        spec.has_location = True
        module_ = importlib.util.module_from_spec(spec)
        sys.modules[name] = module_  # dataclasses look their module up there
        try:
            spec.loader.exec_module(module_)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[name]
            raise
        return module_

    return _Hashed((file,), digest, module)


def _hash_package(name: str, kind: str) -> _Hashed:
    """Digest of all Python files of the outermost package, or of a module without a package."""
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
        got, advice = ("none", "install it with Roostream")
        if spec is not None:
            got, advice = ("a folder without __init__.py", "add this file")
        raise ConfigError(
            f"model {kind!r}: expected package {top!r} in this environment, got {got}; {advice}"
        )
    origin = Path(spec.origin).resolve()
    root = origin.parent
    files = sorted(root.rglob("*.py")) if spec.submodule_search_locations else [origin]
    hashed = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        hashed.update(f"{file.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return _Hashed((str(origin), *map(str, files)), hashed.hexdigest(), lambda: importlib.import_module(name))


def _config_and_build(
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
            f"model {kind!r}: expected Config as a frozen dataclass that extends {base}, got {config!r} in "
            f"{file}; write @dataclass(frozen=True, kw_only=True) class Config({CustomModelConfig.__name__})"
        )
    return config, build


class CustomModel(Model):
    """Wraps the user's model; parameters are named `own.…`.

    Exceptions and results of a wrong shape become ConfigErrors with file and line.
    """

    def __init__(self, code: CustomCode, schema: Schema, config: CustomModelConfig) -> None:
        """Raises ConfigError: the function raised, or did not return a `Model`."""
        super().__init__()
        self._code, self._num_tasks = code, len(schema.tasks)
        # Torch's attention computes other bits without gradients, unless its fast path is off.
        torch.backends.mha.set_fastpath_enabled(False)
        function = code.kind.rpartition(":")[2]
        with (
            _torch_settings_kept(f"model {code.kind!r}: {code.files[0]}: {function}: "),
            user_errors_as_config_errors(code, function),
        ):
            own = code.build(schema, config)
        if not isinstance(own, Model):
            is_compiled = isinstance(getattr(own, "_orig_mod", None), Model)
            advice = "compile modules inside of it" if is_compiled else "extend it and return one"
            raise ConfigError(
                f"model {code.kind!r}: expected a roostream.models.model.Model, got {type(own).__name__} "
                f"({code.files[0]}); {advice}"
            )
        for wrong in _unfit_parts(own):
            raise ConfigError(f"model {code.kind!r}: {code.files[0]}: {wrong}")
        self.own = own

    def forward(self, inputs: Inputs) -> Tensor:
        with user_errors_as_config_errors(self._code, "forward"):
            logits_BT = self.own(inputs)
        self._expect("forward", "logits", logits_BT, (len(inputs.request_index_B), self._num_tasks))
        if logits_BT.dtype != torch.float32 and not torch.is_autocast_enabled(logits_BT.device.type):
            raise ConfigError(
                f"model {self._code.kind!r}: {self._place_of('forward')}: expected logits of float32, got "
                f"{logits_BT.dtype}; convert them at the end of forward"
            )
        return logits_BT

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        with user_errors_as_config_errors(self._code, "loss"):
            value = self.own.loss(inputs, logits_BT, targets)
        self._expect("loss", "a scalar", value, ())
        return value

    def column_names(self) -> dict[str, ColumnNames]:
        with user_errors_as_config_errors(self._code, "column_names"):
            names = self.own.column_names()
        shapes = {name: value.shape for name, value in self.own.state_dict().items()}
        if wrong := wrong_names(names, shapes):
            raise ConfigError(f"model {self._code.kind!r}: {self._place_of('column_names')}: {wrong}")
        return with_prefix("own", names)

    def _expect(self, method: str, what: str, value: object, shape: tuple[int, ...]) -> None:
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"model {self._code.kind!r}: {self._place_of(method)}: expected {method} to give {what} of "
                f"shape {shape}, got {got}; correct it"
            )

    def _place_of(self, method: str) -> str:
        """File and line."""
        # None: the method is not written in Python.
        code = getattr(inspect.unwrap(getattr(type(self.own), method)), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else self._code.files[0]

    def backward(self, loss: Tensor, inputs: Inputs) -> None:
        """Compute the gradients of `loss`. Raises ConfigError: it has none, its graph is broken, or they are
        sparse."""
        if not loss.requires_grad:
            raise ConfigError(
                f"model {self._code.kind!r}: {self._place_of('loss')}: expected a loss with gradients, got "
                "one without; look for detach and no_grad"
            )
        with user_errors_as_config_errors(self._code, "the backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        for tensor in (*self.parameters(), *inputs.rows.values()):
            if tensor.grad is not None and tensor.grad.is_sparse:
                raise ConfigError(
                    f"model {self._code.kind!r}: {self._place_of('forward')}: expected dense gradients, got "
                    "sparse ones; leave sparse = True out"
                )


def backward(model: Model, loss: Tensor, inputs: Inputs) -> None:
    """Compute the gradients of `loss`, a result of `model.loss` for `inputs`. Raises ConfigError: a custom
    model is at fault."""
    if isinstance(model, CustomModel):
        model.backward(loss, inputs)
    else:
        loss.backward()  # type: ignore[no-untyped-call]


def _unfit_parts(own: nn.Module) -> Iterator[str]:
    """Sentences on parameters, buffers and layers that cannot be trained, stored or served."""
    for name, layer in own.named_modules():
        bases = {f"{base.__module__}.{base.__name__}" for base in type(layer).__mro__}
        if _TORCHREC_COLLECTIONS & bases:
            yield (
                f"layer {name!r}: expected rows of the shards, got TorchRec's {type(layer).__name__} with "
                "rows of its own; take RemoteEmbeddingBagCollection, or inputs.rows for a sequence"
            )
    for name, parameter in own.named_parameters():
        what = f"parameter {name!r}"
        if is_lazy(parameter):
            yield f"{what}: expected a shape, got a lazy layer; give it its widths"
        elif parameter.dtype != torch.float32:
            yield f"{what}: expected float32, got {parameter.dtype}; convert inside forward"
        elif parameter.device.type != "cpu":
            yield f"{what}: expected it on the CPU, got {parameter.device}; the worker's `device` moves it"
    for name, layer in own.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            yield f"layer {name!r}: expected dense gradients, got sparse = True; leave it out"
    for name, value in own.state_dict().items():
        if not isinstance(value, Tensor):
            yield f"expected tensors to store, got {type(value).__name__} in {name!r}; keep it in no module"


@contextlib.contextmanager
def user_errors_as_config_errors(code: CustomCode, method: str) -> Iterator[None]:
    """Turn exceptions of the user's code into ConfigErrors; out-of-memory errors pass through."""
    try:
        yield
    except (RoostreamError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"model {code.kind!r} failed in {method}: {describe_error(error, code.files)}; correct its code"
        ) from None
