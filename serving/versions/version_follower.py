"""Follows the committed model versions: the newest manifest of the store becomes a verified, warmed-up
`Version`.

Manifest and dense file (docs/protocols.md) are verified by checksum before use, and a new version scores
recent requests before it is served. A version that is damaged or fails is refused with one warning; the
version in use stays (guarantee G5).

The store is authoritative, also after a rollback: if the newest manifest is older than the version in use
(`roostream checkpoint rollback`), that older version is served again, and withdrawn versions are unloaded. A
commit is known by its whole manifest, so a new commit of a known number replaces the one that was discarded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from roostream.errors import CheckpointError, ConfigError, UnavailableError, describe_error, printable
from roostream.models.build import model_config_from_dict
from roostream.models.custom.loading import is_custom
from roostream.models.inputs import changed_inputs
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.manifest import Manifest
from roostream.schema.schema import Schema
from serving.errors import NonFiniteScoreError, RequestError, VersionRefusedError, shown
from serving.scorer import FIRST, RowReader, Version, build_version
from serving.versions.idle_gate import MAX_IDLE_WAIT_S, IdleGate
from serving.versions.loaded_versions import KEPT, LoadedVersions
from serving.versions.recent_requests import RecentRequests, ScoredRequest

log = logging.getLogger("roostream.serving.versions")

POLL_S = 1.0
RECHECK_POLLS = 30
"""A refused manifest is read again after so many polls, because another commit may have taken its name."""
MAX_NON_FINITE = 8


def read_weights(store: CheckpointStore, manifest: Manifest, schema: Schema) -> dict[str, torch.Tensor]:
    """Read the model's parameters of a commit.

    Raises:
        CheckpointError: the file does not match the manifest.
        VersionRefusedError: a parameter is not finite, or the commit has other transforms or settings of
        features than `schema`.
    """
    name, data = manifest.dense.name, manifests.read_file(store, manifest.dense)
    try:
        tensors, _ = tensor_file.decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if changed := changed_inputs(tensors, schema):
        raise VersionRefusedError(
            "schema",
            f"{manifest.name}: expected the {' and '.join(sorted(changed))} of the schema of serving, got "
            "others; use the trainer's schema file, or wait for its next commit",
        )
    weights = {
        n.removeprefix("model."): torch.from_numpy(a) for n, a in tensors.items() if n.startswith("model.")
    }
    for parameter, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise VersionRefusedError(
                "not_finite", f"{name}: parameter {parameter} is not finite; the version is not served"
            )
    return weights


class _Commit(NamedTuple):
    """A manifest as it is stored. Its bytes tell it from another commit of the same number, which a rollback
    and a later incarnation can make."""

    name: str
    data: bytes


class _Refused(NamedTuple):
    """A commit that is in the store but is not served."""

    commit: _Commit
    is_damaged: bool  # a file is missing or damaged
    recheck_at: int  # number of the poll that reads its manifest again


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
        self._installed: _Commit | None = None  # the version installed last
        self._seq = 0  # its number
        self._num_polls = 0
        self._refused: dict[str, _Refused] = {}  # by the name of the manifest
        self._away = self._is_empty = False
        self._must_withdraw = False  # since the last installation, until it is known what a rollback removed
        self._looked_for: set[str] = set()  # versions that splits name
        self._refusal = (0, "")  # number of the newest refused commit, and why it is not served

    @property
    def waiting_for(self) -> str:
        """What is missing before this process should be asked: "" once a version was installed, and in a new
        deployment, whose store has no commit. Any thread."""
        if self._installed is not None:
            return ""
        if self._away:
            return "the checkpoint store, which cannot be read"
        return f"a commit that can be served: {refusal}" if (refusal := self._refusal[1]) else ""

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
            installed = self._install_newest()
            self._load_named()
        except UnavailableError as error:
            if not self._away:
                log.warning("cannot read the checkpoint store: %s; the version in use stays", error)
            self._away = True
            return False
        if self._away:
            log.info("the checkpoint store can be read again")
        self._away = False
        return installed

    def _install_newest(self) -> bool:
        names = [name for name in self.store.list(manifests.MANIFESTS) if manifests.seq_of(name)]
        self._note_empty(not names)
        self._num_polls += 1
        if self._must_withdraw and names:  # the store failed before
            self._withdraw(names)
        self._refused = {name: refused for name, refused in self._refused.items() if name in names}
        for name in sorted(names, key=manifests.seq_of, reverse=True):
            refused = self._refused.get(name)
            if refused is not None and self._num_polls < refused.recheck_at:
                continue
            commit = self._read(name)
            if commit is None or self._is_still_refused(commit):
                continue
            if commit == self._installed:
                return False
            if self._install(commit):
                self._must_withdraw = True
                self._withdraw(names)
                return True
        return False

    def _is_still_refused(self, commit: _Commit) -> bool:
        """Whether the commit was refused and trying it again cannot help. It can if a file was missing: on a
        shared file system, a manifest may be visible before the files that it names."""
        refused = self._refused.get(commit.name)
        if refused is None or refused.is_damaged or refused.commit != commit:
            return False
        self._keep_refused(commit, is_damaged=False)
        return True

    def _keep_refused(self, commit: _Commit, *, is_damaged: bool) -> None:
        self._refused[commit.name] = _Refused(commit, is_damaged, self._num_polls + RECHECK_POLLS)

    def _read(self, name: str) -> _Commit | None:
        """None: it was deleted since the store was listed."""
        try:
            return _Commit(name, self.store.get(name))
        except CheckpointError as error:
            log.debug("%s", error)
            return None

    def _note_empty(self, is_empty: bool) -> None:
        """A store without manifests is no reason to serve an untrained model: perhaps it is not mounted."""
        if is_empty and not self._is_empty and self._installed is not None:
            log.warning("the checkpoint store lists no manifests any more; the version in use stays")
        self._is_empty = is_empty

    def _install(self, commit: _Commit) -> bool:
        """Load the model version of a commit and offer it for serving. Returns False if the commit was rolled
        back, or is damaged or does not fit; it is then refused.

        Raises:
            UnavailableError: a file cannot be read now. Nothing was changed; call again.
        """
        try:
            manifest = manifests.load_data(commit.name, commit.data).manifest
            self.check(manifest)
            if manifests.is_rolled_back(self.store, manifest.seq, manifest.incarnation):
                log.warning("%s is not served: it was rolled back", commit.name)
                self._keep_refused(commit, is_damaged=False)
                return False
            version = self._held(manifest) or self._load(manifest)
        except CheckpointError as error:
            self._refuse(commit, error)
            return False
        if manifest.seq < self._seq:
            log.warning("the store was rolled back to model version %s", version.name)
        self._installed, self._seq = commit, manifest.seq
        self.versions.install(version, manifest.time_ms, manifest.watermark_ms)
        log.info("model version %s installed, %s is served", version.name, self.versions.served.version.name)
        return True

    def _load_named(self) -> None:
        """Load the versions that the settings name for splits, which a restarted process does not have. With
        a split of `newest` or `previous`, two others must be loaded first.

        Raises:
            UnavailableError: as `_install`.
        """
        routing, loaded = self.versions.routing, {h.version.name for h in self.versions.loaded} - {FIRST}
        if not loaded or (routing.uses_positions and len(loaded) < KEPT):
            return
        for version in set(routing.names) - self._looked_for - loaded:
            name = manifests.manifest_name(int(version.rpartition("-")[2]))
            try:
                manifest = manifests.load(self.store, name).manifest
                if manifest.version != version:
                    raise CheckpointError(f"{name}: expected version {version}, got {manifest.version}")
                found = self._load(manifest)
            except CheckpointError as error:
                log.warning("model version %s, which a split names, cannot be served: %s", version, error)
            else:
                self.versions.add_older(found, manifest.time_ms, manifest.watermark_ms)
            self._looked_for.add(version)

    def _withdraw(self, names: list[str]) -> None:
        """Unload the versions that a rollback removed: their number is gone, though not at the old end, where
        expired manifests are removed; or it belongs to a commit of another incarnation.

        Raises:
            UnavailableError: as `_install`.
        """
        name_of = {manifests.seq_of(name): name for name in names}

        def is_withdrawn(version: str) -> bool:
            seq = int(version.rpartition("-")[2])
            if seq not in name_of:
                return seq > min(name_of)
            try:
                return manifests.load(self.store, name_of[seq]).manifest.version != version
            except CheckpointError:
                return False  # damaged or just deleted: nothing says that it was another commit

        self.versions.withdraw(is_withdrawn)
        self._must_withdraw = False

    def _held(self, manifest: Manifest) -> Version | None:
        """A loaded version was verified and warmed up before."""
        return next((h.version for h in self.versions.loaded if h.version.name == manifest.version), None)

    def _refuse(self, commit: _Commit, error: CheckpointError) -> None:
        """Report the refusal once. Of the commits of another schema or model, only the newest is reported."""
        reason = error.reason if isinstance(error, VersionRefusedError) else "damaged"
        seq, before = manifests.seq_of(commit.name), self._refused.get(commit.name)
        self._keep_refused(commit, is_damaged=reason == "damaged")
        if before is not None and before.commit == commit:
            return
        if reason in ("schema", "model") and self.versions.num_refused[reason] and seq < self._refusal[0]:
            return
        log.warning("model version refused: %s", error)
        self._refusal = max(self._refusal, (seq, str(error)))
        self.versions.refuse(commit.name, reason, str(error))

    def _load(self, manifest: Manifest) -> Version:
        fingerprint = f"{self.schema.fingerprint:016x}"
        if manifest.schema != fingerprint:
            raise VersionRefusedError(
                "schema",
                f"{manifest.name}: expected schema {fingerprint} (serving's), got {manifest.schema} (the "
                "trainer's); serving waits for a commit of its schema, so give both the same",
            )
        self.pause()
        weights = read_weights(self.store, manifest, self.schema)
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
            same = "code" if is_custom(manifest.model.get("kind")) else "Roostream"
            raise VersionRefusedError(
                "model",
                f"{manifest.dense.name}: expected the parameters of its model, got others "
                f"({' '.join(str(error).split())}); use the {same} that wrote this commit",
            ) from None
        self.warm_up(version)
        return version


class WarmUp:
    """Tries a new version on recent requests before it is served. Used by one thread.

    A version is refused if it cannot score a request that the version in use can score: it would fail the
    next user. Scores that are not finite refuse it only if they come from more than one in MAX_NON_FINITE of
    the users. A single client can post numbers so extreme that no training bounds their scores.
    Scoring also loads kernels and fills caches of shapes, which the first request would otherwise wait for.
    """

    def __init__(
        self,
        recent: RecentRequests,
        rows: RowReader,
        served: Callable[[], Version],
        idle_gate: IdleGate,
        max_requests: int,
    ) -> None:
        self.recent, self.rows, self.served = recent, rows, served
        self.idle_gate, self.max_requests = idle_gate, max_requests

    def __call__(self, version: Version, stop: threading.Event | None = None) -> None:
        """Score recent requests; nothing is answered, logged or counted.

        Raises:
            VersionRefusedError: it cannot score a request that the version in use can score.
        """
        users, non_finite = set[bytes](), dict[bytes, str]()
        for request in self.recent.warm_up_sample(self.max_requests):
            self.idle_gate.wait(MAX_IDLE_WAIT_S, stop)
            users.add(request.key)
            error = self._failure(version, request)
            if error is None or self._failure(self.served(), request) is not None:
                continue
            why = (
                describe_error(error)
                if isinstance(error, RequestError)
                else f"{type(error).__name__}: {error}"
            )
            why = printable(
                f"{version.name}: expected a score for request {shown(request.request_id)!r}: {why}"
            )
            if not isinstance(error, NonFiniteScoreError):
                raise VersionRefusedError("warm_up", why)
            non_finite[request.key] = why
        if len(non_finite) * MAX_NON_FINITE > len(users):
            raise VersionRefusedError("warm_up", next(iter(non_finite.values())))
        for why in non_finite.values():
            log.warning("%s; the version is served, because it scores the other users' requests", why)

    def _failure(self, version: Version, request: ScoredRequest) -> Exception | None:
        """Any failure of a custom model: it must not reach users."""
        try:
            request.score_with(version, self.rows)
        except RequestError as error:
            return error
        except Exception as error:
            log.debug("warm-up of version %s", version.name, exc_info=True)
            return error
        return None
