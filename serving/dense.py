"""Following dense versions: the newest manifest of the store → a verified `Version`.

Manifests and dense files are those of docs/protocols.md; both are verified by checksum before a byte of them is used. What
is damaged is passed over, with one warning, for the version that is in use (G5).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError

from models.config import ModelConfig, model_config_from_dict
from roo.errors import CheckpointError, ConfigError
from roo.schema import Schema
from runtime.checkpoint_store import CheckpointStore
from runtime.clock import Clock
from serving.scorer import Version, Versions, build_version

log = logging.getLogger("roostream.serving.dense")

POLL_S = 1.0


class ManifestHead(NamedTuple):
    """What serving reads of a manifest."""

    name: str
    seq: int
    incarnation: int
    schema: str  # fingerprint, hex
    model: ModelConfig
    dense_name: str
    dense_bytes: int
    dense_checksum: str
    time_ms: int

    @property
    def version(self) -> str:
        return f"{self.incarnation}-{self.seq}"


def read_manifest(name: str, data: bytes) -> ManifestHead:
    """Raises CheckpointError: damaged, or of another format."""
    try:
        outer = json.loads(data)
        body, stated = outer["body"], outer["checksum"]
        actual = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
        if actual != stated:
            raise CheckpointError(f"{name}: expected checksum {stated}, got {actual}: the manifest is damaged")
        if body["format"] != 1:
            raise CheckpointError(f"{name}: expected manifest format 1, got {body['format']!r}; update serving")
        dense = body["dense"]
        return ManifestHead(
            name=name,
            seq=int(body["seq"]),
            incarnation=int(body["incarnation"]),
            schema=str(body["schema"]),
            model=model_config_from_dict(body["model"]),
            dense_name=str(dense["name"]),
            dense_bytes=int(dense["bytes"]),
            dense_checksum=str(dense["checksum"]),
            time_ms=int(body["time_ms"]),
        )
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise CheckpointError(f"{name}: expected a manifest, got {len(data)} bytes that aren't one ({error})") from None


def read_weights(data: bytes, head: ManifestHead) -> dict[str, torch.Tensor]:
    """The model's parameters of a dense file.

    Raises:
        CheckpointError: its bytes aren't those that the manifest names, or hold what no forward pass can use.
    """
    if len(data) != head.dense_bytes or xxhash.xxh3_64_hexdigest(data) != head.dense_checksum:
        raise CheckpointError(
            f"{head.dense_name}: expected {head.dense_bytes} bytes of checksum {head.dense_checksum}: it is damaged"
        )
    try:
        tensors = safetensors.torch.load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{head.dense_name}: expected a safetensors file ({error})") from None
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{head.dense_name}: parameter {name} isn't finite; it is not served")
    return weights


class DenseFollower:
    """Installs versions as they are committed. `poll` from one thread; `run` is that thread."""

    def __init__(
        self,
        store: CheckpointStore,
        schema: Schema,
        versions: Versions,
        seed: int,
        installed: Callable[[Version, ManifestHead], None] = lambda version, head: None,
    ) -> None:
        self.store, self.schema, self.versions, self.seed, self.installed = store, schema, versions, seed, installed
        self._seq = 0  # of the version in use
        self._bad: set[str] = set()  # manifests that can't be served
        self._away = False

    def run(self, clock: Clock, stop: threading.Event) -> None:
        """Poll every POLL_S until `stop`."""
        while not stop.is_set():
            self.poll()
            clock.sleep(POLL_S, stop)

    def poll(self) -> bool:
        """Install the newest good version if it is newer than the one in use; True if it did."""
        try:
            names = self.store.list("manifests")
        except OSError as error:
            return self._unreadable(error)
        for name in sorted(names, reverse=True):
            number = name.rsplit("/", 1)[-1]
            if number.isdecimal() and int(number) <= self._seq:
                return False
            if name not in self._bad and self._install(name):
                return True
        return False

    def _install(self, name: str) -> bool:
        try:
            head = read_manifest(name, self.store.get(name))
            version = self._load(head)
        except CheckpointError as error:
            log.warning("dense version not taken: %s", error)
            self._bad.add(name)
            return False
        except OSError as error:
            return self._unreadable(error)
        self._seq, self._away = head.seq, False
        self.versions.install(version)
        self.installed(version, head)
        log.info("dense version %s is served", version.name)
        return True

    def _load(self, head: ManifestHead) -> Version:
        if head.schema != f"{self.schema.fingerprint:016x}":
            raise CheckpointError(
                f"{head.name}: expected schema {self.schema.fingerprint:016x} (serving's), got {head.schema} (the trainer's); "
                "restart serving with the trainer's schema"
            )
        weights = read_weights(self.store.get(head.dense_name), head)
        try:
            return build_version(head.version, self.schema, head.model, self.seed, weights)
        except RuntimeError as error:
            raise CheckpointError(f"{head.dense_name}: expected the parameters of its model: {error}") from None

    def _unreadable(self, error: OSError) -> bool:
        """Trying again can help; said once an outage."""
        if not self._away:
            log.warning("the checkpoint store can't be read: %s; the version in use stays", error.strerror)
        self._away = True
        return False
