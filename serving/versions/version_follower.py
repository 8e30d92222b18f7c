"""Follows the committed model versions: the newest manifest of the store becomes a verified, warmed-up
`Version`.

Manifest and dense file (docs/protocols.md) are verified by checksum before use, and a new version scores
recent requests before it is served. A version that is damaged or fails is refused with one warning; the
version in use stays (G5).

The store is authoritative, also after a rollback: if the newest manifest is older than the version in use
(`roostream checkpoint rollback`), that older version is served again, and withdrawn versions are unloaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from roostream.errors import CheckpointError, ConfigError, UnavailableError, describe_error
from roostream.models.build import model_config_from_dict
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.manifest import Manifest
from roostream.schema.schema import Schema
from serving.errors import RequestError, VersionRefusedError
from serving.scorer import RowReader, Version, build_version
from serving.versions.idle_gate import MAX_IDLE_WAIT_S, IdleGate
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.recent_requests import RecentRequests, ScoredRequest

log = logging.getLogger("roostream.serving.versions")

POLL_S = 1.0


def read_weights(store: CheckpointStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Read the model's parameters of a commit.

    Raises:
        CheckpointError: the file does not match the manifest.
        VersionRefusedError: a parameter is not finite.
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
                "not_finite", f"{name}: parameter {parameter} is not finite; the version is not served"
            )
    return weights


def _is_withdrawn(version: str, seqs: set[int]) -> bool:
    """Whether the manifest was removed by a rollback. Expired manifests are removed from the old end
    instead."""
    seq = int(version.rpartition("-")[2])
    return seq not in seqs and seq > min(seqs, default=seq)


class VersionFollower:
    """Installs versions as they are committed. Call `poll` from one thread; `run` is that thread."""

    def __init__(
        self,
        store: CheckpointStore,
        schema: Schema,
        versions: LoadedVersions,
        seed: int,
        check: Callable[[Manifest], None] = lambda manifest: None,
        warm_up: Callable[[Version], None] = lambda version: None,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        """`check` raises ConfigError for a commit of a deployment of another shape, `warm_up` raises
        VersionRefusedError. `pause` is called before each step of a few ms, so that requests get the
        interpreter first. New versions score `as_trained` like the newest one.
        """
        self.check, self.warm_up, self.pause = check, warm_up, pause
        self.store, self.schema, self.versions, self.seed = store, schema, versions, seed
        self._as_trained = versions.newest.as_trained
        self._seq = 0  # of the newest installed version
        self._bad: set[str] = set()  # manifests that cannot be served
        self._away = False

    def run(self, clock: Clock, stop: threading.Event) -> None:
        """Poll every POLL_S until `stop`."""
        while not stop.is_set():
            self.poll()
            clock.sleep(POLL_S, stop)

    def poll(self) -> bool:
        """Install the newest good version if it differs from the one installed last; return whether it did.

        Raises:
            ConfigError: the commit belongs to a deployment of another shape (`check`).
        """
        try:
            names = self.store.list("manifests")
        except UnavailableError as error:
            return self._unreadable(error)
        seqs = {seq for name in names if (seq := manifests.seq_of(name))}
        # 0 after a rollback: the newest remaining manifest is installed
        known = self._seq if self._seq <= max(seqs, default=self._seq) else 0
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
            log.warning("the store was rolled back to model version %s", version.name)
        self._seq, self._away = manifest.seq, False
        self.versions.install(version, manifest.time_ms, manifest.watermark_ms)
        log.info("model version %s installed, %s is served", version.name, self.versions.served.version.name)
        return True

    def _held(self, manifest: Manifest) -> Version | None:
        """A loaded version was verified and warmed up before."""
        return next((h.version for h in self.versions.loaded if h.version.name == manifest.version), None)

    def _refuse(self, name: str, error: CheckpointError) -> None:
        """Log the refusal once; the manifest is not tried again."""
        log.warning("model version refused: %s", error)
        self._bad.add(name)
        reason = error.reason if isinstance(error, VersionRefusedError) else "damaged"
        self.versions.refuse(name, reason, str(error))

    def _load(self, manifest: Manifest) -> Version:
        mine = f"{self.schema.fingerprint:016x}"
        if manifest.schema != mine:
            raise VersionRefusedError(
                "schema",
                f"{manifest.name}: expected schema {mine} (serving's), got {manifest.schema} (the "
                "trainer's); "
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
        """Retried later; logged once per outage."""
        if not self._away:
            log.warning("cannot read the checkpoint store: %s; the version in use stays", error)
        self._away = True
        return False


class WarmUp:
    """Tries a new version on recent requests before it is served. Used by one thread.

    A version is refused if it cannot score a request that the version in use can score: it would fail the
    next user. Scoring also loads kernels and fills caches of shapes, which the first request would otherwise
    wait for.
    """

    def __init__(
        self,
        recent: RecentRequests,
        rows: RowReader,
        served: Callable[[], Version],
        idle_gate: IdleGate,
        max_requests: int,
    ) -> None:
        self.recent, self.rows, self.served, self.idle_gate, self.max_requests = (
            recent,
            rows,
            served,
            idle_gate,
            max_requests,
        )

    def __call__(self, version: Version, stop: threading.Event | None = None) -> None:
        """Score recent requests; nothing is answered, logged or counted.

        Raises:
            VersionRefusedError: it cannot score a request that the version in use can score.
        """
        for request in self.recent.warm_up_sample(self.max_requests):
            self.idle_gate.wait(MAX_IDLE_WAIT_S, stop)
            failure = self._failure(version, request)
            if failure and not self._failure(self.served(), request):
                raise VersionRefusedError(
                    "warm_up", f"{version.name}: expected a score for request {request.request_id}: {failure}"
                )

    def _failure(self, version: Version, request: ScoredRequest) -> str:
        try:
            request.score_with(version, self.rows)
        except RequestError as error:
            return describe_error(error)
        except Exception as error:  # any failure of a custom model must not reach users
            log.debug("warm-up of version %s", version.name, exc_info=True)
            return f"{type(error).__name__}: {error}"
        return ""
