"""Following dense versions: the newest manifest of the store → a verified `Version`.

Manifests and dense files are those of docs/protocols.md; both are verified by checksum before a byte of them is used. What
is damaged is passed over, with one warning, for the version that is in use (G5).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from models.build import model_config_from_dict
from roo.errors import CheckpointError, ConfigError, UnavailableError
from roo.schema import Schema
from runtime import manifest as manifests
from runtime import tensor_file
from runtime.checkpoint_store import CheckpointStore
from runtime.clock import Clock
from runtime.manifest import Manifest
from serving.scorer import Version, build_version
from serving.versions.held import Versions

log = logging.getLogger("roostream.serving.dense")

POLL_S = 1.0


def read_weights(store: CheckpointStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's parameters of a commit.

    Raises:
        CheckpointError: the file's bytes aren't those that the manifest names, or hold what no forward pass can use.
    """
    name, data = manifest.dense.name, manifests.read_file(store, manifest.dense)
    try:
        tensors, _ = tensor_file.decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    weights = {n.removeprefix("model."): torch.from_numpy(a) for n, a in tensors.items() if n.startswith("model.")}
    for parameter, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name}: parameter {parameter} isn't finite; it is not served")
    return weights


class DenseFollower:
    """Installs versions as they are committed. `poll` from one thread; `run` is that thread."""

    def __init__(
        self,
        store: CheckpointStore,
        schema: Schema,
        versions: Versions,
        seed: int,
        installed: Callable[[Version, Manifest], None] = lambda version, manifest: None,
        check: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        """`installed` is told of every version; `check` raises ConfigError for a manifest of a deployment of another shape."""
        self.check = check
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
        """Install the newest good version if it is newer than the one in use; True if it did.

        Raises:
            ConfigError: what is committed belongs to a deployment of another shape (`check`).
        """
        try:
            names = self.store.list("manifests")
        except UnavailableError as error:
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
            manifest = manifests.load(self.store, name).manifest
            self.check(manifest)
            version = self._load(manifest)
        except CheckpointError as error:
            log.warning("dense version not taken: %s", error)
            self._bad.add(name)
            return False
        except UnavailableError as error:
            return self._unreadable(error)
        self._seq, self._away = manifest.seq, False
        self.versions.install(version)
        self.installed(version, manifest)
        log.info("dense version %s is served", version.name)
        return True

    def _load(self, manifest: Manifest) -> Version:
        mine = f"{self.schema.fingerprint:016x}"
        if manifest.schema != mine:
            raise CheckpointError(
                f"{manifest.name}: expected schema {mine} (serving's), got {manifest.schema} (the trainer's); "
                "restart serving with the trainer's schema"
            )
        weights = read_weights(self.store, manifest)
        try:
            model = model_config_from_dict(manifest.model)
            return build_version(manifest.version, self.schema, model, self.seed, weights)
        except ConfigError as error:
            raise CheckpointError(f"{manifest.name}: expected the configuration of its model: {error}") from None
        except RuntimeError as error:
            raise CheckpointError(f"{manifest.dense.name}: expected the parameters of its model: {error}") from None

    def _unreadable(self, error: UnavailableError) -> bool:
        """Trying again can help; said once an outage."""
        if not self._away:
            log.warning("the checkpoint store can't be read: %s; the version in use stays", error)
        self._away = True
        return False
