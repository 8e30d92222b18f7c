"""Following dense versions: the newest manifest of the store → a verified `Version` that has been tried.

Manifests and dense files are those of docs/protocols.md; both are verified by checksum before a byte of them is used, and a
version scores recent requests before it is served (serving/versions/warm_up.py). What is damaged, or fails there, is refused,
with one warning, for the version that is in use (G5).

The store is the truth, also where it goes back: when the newest manifest is older than the version in use (`roostream checkpoint
rollback`), that one is served again, and what was withdrawn is no longer held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.models.build import model_config_from_dict
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.manifest import Manifest
from roostream.schema.schema import Schema
from serving.errors import VersionRefusedError
from serving.scorer import Version, build_version
from serving.versions.held import Versions

log = logging.getLogger("roostream.serving.dense")

POLL_S = 1.0


def read_weights(store: CheckpointStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's parameters of a commit.

    Raises:
        CheckpointError: the file's bytes aren't those that the manifest names.
        VersionRefusedError: they hold what no forward pass can use.
    """
    name, data = manifest.dense.name, manifests.read_file(store, manifest.dense)
    try:
        tensors, _ = tensor_file.decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    weights = {
        n.removeprefix("model."): torch.from_numpy(a) for n, a in tensors.items() if n.startswith("model.")
    }
    for parameter, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise VersionRefusedError(
                "not_finite", f"{name}: parameter {parameter} isn't finite; it is not served"
            )
    return weights


def _is_withdrawn(version: str, seqs: set[int]) -> bool:
    """Its manifest isn't there although older ones are: those that are no longer kept go from the old end."""
    seq = int(version.rpartition("-")[2])
    return seq not in seqs and seq > min(seqs, default=seq)


class DenseFollower:
    """Installs versions as they are committed. `poll` from one thread; `run` is that thread."""

    def __init__(
        self,
        store: CheckpointStore,
        schema: Schema,
        versions: Versions,
        seed: int,
        check: Callable[[Manifest], None] = lambda manifest: None,
        warm_up: Callable[[Version], None] = lambda version: None,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        """`check` raises ConfigError for a manifest of a deployment of another shape, `warm_up` VersionRefusedError. What comes
        is scored as the newest of `versions` is (`as_trained`). `pause` comes before each step of a version, of a few ms at
        most: requests have the interpreter first."""
        self.check, self.warm_up, self.pause = check, warm_up, pause
        self.store, self.schema, self.versions, self.seed = store, schema, versions, seed
        self._as_trained = versions.newest.as_trained
        self._seq = 0  # of the newest that was installed
        self._bad: set[str] = set()  # manifests that can't be served
        self._away = False

    def run(self, clock: Clock, stop: threading.Event) -> None:
        """Poll every POLL_S until `stop`."""
        while not stop.is_set():
            self.poll()
            clock.sleep(POLL_S, stop)

    def poll(self) -> bool:
        """Install the newest good version if it is another than the one installed last; True if it did.

        Raises:
            ConfigError: what is committed belongs to a deployment of another shape (`check`).
        """
        try:
            names = self.store.list("manifests")
        except UnavailableError as error:
            return self._unreadable(error)
        seqs = {seq for name in names if (seq := manifests.seq_of(name))}
        known = (
            self._seq if self._seq <= max(seqs, default=self._seq) else 0
        )  # 0: the store went back, what is left there comes
        for name in sorted(names, reverse=True):
            if 0 < manifests.seq_of(name) <= known:
                return False
            if name not in self._bad and self._install(name):
                self.versions.withdraw(lambda version: _is_withdrawn(version, seqs))
                return True
        return False

    def _install(self, name: str) -> bool:
        try:
            manifest = manifests.load(self.store, name).manifest
            self.check(manifest)
            version = self._held(manifest) or self._load(manifest)
        except CheckpointError as error:
            self._refuse(name, error)
            return False
        except UnavailableError as error:
            return self._unreadable(error)
        if manifest.seq < self._seq:
            log.warning("the store went back to dense version %s", version.name)
        self._seq, self._away = manifest.seq, False
        self.versions.install(version, manifest.time_ms)
        log.info("dense version %s is here, %s is served", version.name, self.versions.served.version.name)
        return True

    def _held(self, manifest: Manifest) -> Version | None:
        """It was checked and tried when it came."""
        return next((h.version for h in self.versions.held if h.version.name == manifest.version), None)

    def _refuse(self, name: str, error: CheckpointError) -> None:
        """Said once: it is not tried again."""
        log.warning("dense version not taken: %s", error)
        self._bad.add(name)
        reason = error.reason if isinstance(error, VersionRefusedError) else "damaged"
        self.versions.refuse(name, reason, str(error))

    def _load(self, manifest: Manifest) -> Version:
        mine = f"{self.schema.fingerprint:016x}"
        if manifest.schema != mine:
            raise VersionRefusedError(
                "schema",
                f"{manifest.name}: expected schema {mine} (serving's), got {manifest.schema} (the trainer's); "
                "restart serving with the trainer's schema",
            )
        self.pause()
        weights = read_weights(self.store, manifest)
        self.pause()
        try:
            model = model_config_from_dict(manifest.model)
            version = build_version(
                manifest.version, self.schema, model, self.seed, weights, self._as_trained
            )
        except ConfigError as error:
            raise VersionRefusedError(
                "model", f"{manifest.name}: expected the configuration of its model: {error}"
            ) from None
        except RuntimeError as error:
            raise VersionRefusedError(
                "model", f"{manifest.dense.name}: expected the parameters of its model: {error}"
            ) from None
        self.warm_up(version)
        return version

    def _unreadable(self, error: UnavailableError) -> bool:
        """Trying again can help; said once an outage."""
        if not self._away:
            log.warning("the checkpoint store can't be read: %s; the version in use stays", error)
        self._away = True
        return False
