"""Executes the controller's commands around the training loop: restore, start, cut, resume, write, commit,
abort.

    restore ──► start ──► training ──► cut ──► paused ──► resume ──► training
                          │                 write stores the snapshot meanwhile; commit or abort drops it
                          └─ a shard is unavailable, or Kafka rejected a prediction: the worker is broken,
                             the next beat reports it, and everyone is restored; predictions are sent again

The loop runs in the caller's thread. Commands arrive on the controller agent's thread and run between two
batches, except `write`, which uses the snapshot and does not pause training. One of several workers keeps
taking turns (lockstep.py) until all cut together. A newer command that the agent hears ends such a wait."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from roostream.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    RoostreamError,
    UnavailableError,
    describe_error,
)
from roostream.models.build import ADDED_PARTS, model_config_from_dict
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.controller_agent import check_command_schema
from roostream.runtime.kafka.topics import CORRECTIONS, Partition, nested
from roostream.runtime.manifest import Manifest
from roostream.runtime.store_identity import check_same_store
from roostream.runtime.work_unit import TableInput
from trainer.deployment_identity import DeploymentIdentity
from trainer.failure_policy import FailurePolicy
from trainer.lockstep import LockStep
from trainer.loop import Snapshot, TrainLoop
from trainer.monitoring.progressive_metrics import SHARED_SCORES, summarize
from trainer.partitions import (
    PartitionSnapshot,
    encode_partitions,
    id_files,
    metrics_of_snapshots,
    read_partitions,
    store_ids,
    with_new_partitions,
)
from trainer.predictions import DurableOutputs
from trainer.process_group import (
    SINGLE_WORKER,
    GroupSpec,
    ProcessGroup,
    Rendezvous,
    SingleWorkerGroup,
    is_out_of_memory,
)
from trainer.read_bounds import ReadBounds

log = logging.getLogger("roostream.worker")

Command = dict[str, Any]
_IDLE_S = 0.1
_MAX_WRONG_SHARDS = 3
_AGREE_S = 30.0  # less than the controller's time limit for a step of a commit


class Worker:
    """`execute` runs a command, `turn` trains a batch. Both run in the loop's thread, except
    `execute("write")`."""

    def __init__(
        self,
        loop: TrainLoop,
        outputs: DurableOutputs,
        store: CheckpointStore,
        identity: DeploymentIdentity,
        index: int = 0,
        rendezvous: Rendezvous = SINGLE_WORKER,
    ) -> None:
        """`outputs`: those of the loop. `rendezvous`: how it connects to other workers."""
        self.loop, self.outputs, self.store, self.identity, self.index = loop, outputs, store, identity, index
        self.rendezvous = rendezvous
        self.group: ProcessGroup = SingleWorkerGroup()
        self.lockstep: LockStep | None = None  # None: it trains alone
        self.read_bounds = ReadBounds(loop)
        self.incarnation = 0
        self.training = False
        self.broken = ""  # why it cannot continue in this incarnation
        self.fatal = ""  # why no restore can fix it
        self.committed_step = 0
        self.failures = FailurePolicy(loop, index)
        # Called during a commit in the agent's thread; may not raise.
        self.on_write: Callable[[], None] = lambda: None
        # Called before training starts; raises ConfigError if the settings name the wrong shards.
        self.check_shards: Callable[[], None] = lambda: None
        # Called while rows are loaded or saved, which may take minutes; may not raise.
        self.on_progress: Callable[[], None] = lambda: None
        self._wrong_shards = 0  # checks in a row that failed
        self.leaving = False  # it is stopping: no more batches, a last commit, then exit
        # Grows meanwhile, so that the controller sees that a cut does not hang.
        self._progress = 0
        self._snapshot: tuple[int, Snapshot] | None = None
        # The partitions of the newest commit that was written, with the files of their ids.
        self._stored: tuple[int, Mapping[Partition, PartitionSnapshot]] = (0, {})
        self._cut_s: float | None = None  # since when training is paused for a commit
        self._aborted = 0  # newest aborted commit; a cut that arrives after its abort is refused
        # Newest incarnation to restore to, and its newest commit to abort, among the commands that were
        # heard.
        self._heard = 0, 0
        # Why this worker cannot use what is committed; no restart helps, and `turn` raises it.
        self.refusal: ConfigError | None = None
        self._inbox: queue.SimpleQueue[tuple[Command, concurrent.futures.Future[dict[str, Any]]]] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()

    def execute(self, command: Command) -> dict[str, Any]:
        """Run one command. Returns the fields of its result.

        Raises:
            CheckpointError: a file is damaged or absent; an older manifest may work.
            ConfigError: the commit belongs to other settings. The next `turn` raises it too, and the worker
                exits.
            RoostreamError: the command is not possible now.

        **If it fails:** after a failed restore the loop stays stopped until the next one; after a failed cut
        training continues."""
        kinds: dict[str, Callable[[Command], dict[str, Any]]] = {
            "restore": self._restore,
            "start": self._start,
            "cut": self._cut,
            "resume": self._resume,
            "write": self._write,
            "commit": self._commit,
            "abort": self._abort,
        }
        if command["kind"] not in kinds:
            raise RoostreamError(f"expected one of {', '.join(kinds)}, got command {command['kind']!r}")
        return kinds[command["kind"]](command)

    def turn(self) -> bool:
        """Train on the next batch, if training is running and a batch is due. Raises ConfigError: this worker
        cannot use what is committed (its schema or Kafka); it must exit."""
        if self.refusal is not None:
            raise self.refusal
        if not self.training:
            return False
        if refused := self.outputs.refused():
            self._break(refused)
            return False
        if self.leaving and self.lockstep is None:
            return False
        try:
            return self.lockstep.turn(leaving=self.leaving).trains if self.lockstep else self.loop.step()
        except (UnavailableError, FencedError) as error:
            self._break_after(error)
            return False
        except Exception as error:
            if not is_out_of_memory(error):  # the supervisor restarts the worker, which may fail again
                self.failures.save(f"{error!r:.1000}")
                raise
            cause = f"{str(error) or 'no reason given':.300}"
            self.fatal = f"out of memory: {cause}; give the worker more memory, or lower batch_requests"
            self._break(self.fatal)
            return False

    @property
    def is_cut(self) -> bool:
        """Whether a commit is in progress, from the cut to its commit or abort."""
        return self._snapshot is not None

    def can_leave(self) -> bool:
        """Whether stopping now loses no training."""
        return not self.is_cut and (not self.training or self.loop.num_steps == self.committed_step)

    def _break(self, reason: str) -> None:
        log.warning("training stops until the controller restores all members: %s", reason)
        self.training, self.broken = False, reason
        self.group.leave()

    def _break_after(self, error: RoostreamError) -> None:
        self.fatal = self.failures.permanent_reason(error)
        self._break(self.fatal or describe_error(error) or "a shard is unavailable")

    def note_progress(self) -> None:
        """A part of a long load or save is done. Any thread."""
        self._progress += 1
        self.on_progress()

    def report(self) -> dict[str, Any]:
        """Fields of every beat. Cheap; any thread."""
        return {
            "step": self.loop.num_steps,
            "watermark_ms": self.loop.watermark_ms,
            "training": self.training,
            "broken": self.broken,
            "fatal": self.fatal,
            "leaving": self.leaving,
            "saved": self.failures.saved,
            "progress": self._progress,
            "meet": self.rendezvous.address,
            **self.read_bounds.report(),
            **dataclasses.asdict(self.loop.counts),
            "outcomes": dict(self.loop.outcomes.total),
        }

    # Called from two threads

    def submit(self, command: Command) -> dict[str, Any]:
        """Run a command for the agent's thread: in the loop's thread between two batches, or here if it needs
        no pause."""
        if command["kind"] == "write":
            return self.execute(command)
        self.hear(command)
        done: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._inbox.put((command, done))
        while not self._closed.is_set():
            if concurrent.futures.wait([done], timeout=0.5).done:
                return done.result()
        raise UnavailableError("the worker is stopping")

    def hear(self, command: Command) -> None:
        """Note a command as soon as it arrives, before earlier ones are done, because it may end what they
        wait for. Any thread."""
        incarnation, kind = int(command["incarnation"]), command["kind"]
        if kind == "restore":
            self._heard = max(self._heard, (incarnation, 0))
            self.outputs.interrupt()  # the loop may be waiting for queue space
            self.group.interrupt()
        elif kind == "abort":
            self._heard = max(self._heard, (incarnation, int(command["seq"])))

    def serve_inbox(self) -> None:
        """Run submitted commands in the loop's thread. Waits a little if training is not running."""
        while True:
            try:
                command, done = self._inbox.get(block=not self.training or self.leaving, timeout=_IDLE_S)
            except queue.Empty:
                return
            try:
                done.set_result(self.execute(command))
            except Exception as error:  # handled by the submitting thread
                done.set_exception(error)

    def close(self) -> None:
        self._closed.set()

    # Commands

    def _restore(self, command: Command) -> dict[str, Any]:
        self.training, self._snapshot, self._aborted = False, None, 0
        self.broken = "restoring"
        self.outputs.begin()
        self.group.leave()
        self.read_bounds.clear()
        check_command_schema(command, self.loop.schema.fingerprint)
        check_same_store(self.store, str(command.get("store", "")))
        session = TableInput.of(command.get("input"))
        if "partitions" in command:
            self._assign([int(number) for number in command["partitions"]], session)
        name = str(command.get("manifest", ""))
        manifest, checksum = manifests.load_chosen(self.store, name) if name else (None, "")
        if manifest and manifest.input != session:
            raise FencedError(
                f"expected the input that {name} was trained from, got another one, "
                "whose offsets mean something else"
            )
        self.failures.restored(int(command["incarnation"]), name, checksum)
        if manifest:
            self._check_or_exit(partial(self._check, manifest))
            same_schema = manifest.schema == f"{self.loop.schema.fingerprint:016x}"
            self.loop.restore(self._read(manifest), same_schema=same_schema)
        else:
            self.loop.reset()
        self.committed_step = self.loop.num_steps
        self.incarnation = int(command["incarnation"])
        workers = int(command.get("workers", 1))
        self._check_or_exit(lambda: self.loop.validate(workers=workers))
        address = str(command.get("meet", ""))
        self.group = self.rendezvous.join(GroupSpec(self.incarnation, self.index, workers, address))
        self.lockstep = LockStep(self.loop, self.group, self.read_bounds) if workers > 1 else None
        self.loop.rows.set_incarnation(self.incarnation, workers, manifest.owners if manifest else None)
        self.broken = ""
        log.info("restored %s, step %d", name or "to the beginning", self.loop.num_steps)
        return {}

    def _assign(self, numbers: list[int], session: TableInput | None) -> None:
        """Raises UnavailableError: the session's table is absent or damaged, which is no damage of the
        commit: an older one needs the same table."""
        try:
            self.loop.assign(numbers, session)
        except CheckpointError as error:
            where = session.table if session else "the stream"
            raise UnavailableError(
                f"expected the warehouse {where} as training began with it: {error}"
            ) from None

    def _start(self, command: Command) -> dict[str, Any]:
        try:
            self.check_shards()
            self._wrong_shards = 0
        except ConfigError as error:
            self._wrong_shards += 1
            if self._wrong_shards < _MAX_WRONG_SHARDS:  # an address may belong to a shard that just moved
                raise UnavailableError(str(error)) from None
            self.refusal = error
            raise
        self.read_bounds.begin(command.get("epoch"))
        bounds = self.read_bounds
        self._check_or_exit(
            lambda: self.loop.selection.begin_phase(finite=bounds.is_initial, handed_over=bounds.phased)
        )
        self.training = True
        return {}

    def _cut(self, command: Command) -> dict[str, Any]:
        """Stop after the current batch and take a snapshot. Several workers all cut after the same turn."""
        if int(command["seq"]) <= self._aborted:
            raise FencedError(
                f"expected a commit above {self._aborted} to cut for, got {command['seq']}, which was aborted"
            )
        if self.broken or not self.training:
            raise RoostreamError(
                "expected a training worker to cut, got one that is not training "
                f"({self.broken or 'not started'})"
            )
        if self.lockstep is not None:
            self._agree_on(int(command["seq"]), self.lockstep)
        self._cut_s = self.loop.clock.monotonic_s()
        try:
            self.outputs.flush()
        except UnavailableError:
            if refused := self.outputs.refused():
                self._break(refused)
            raise
        self.training = False
        self.read_bounds.prepare_cut()
        try:
            at = self.loop.snapshot()
        except (UnavailableError, FencedError) as error:
            self._break(describe_error(error))
            raise
        self._snapshot = int(command["seq"]), at
        return {
            "offsets": nested(at.progress),
            "watermark_ms": at.watermark_ms,
            "step": at.step,
            "model": dataclasses.asdict(self.loop.model_config),
            "time_ms": self.loop.clock.now_ms(),
        }

    def _agree_on(self, seq: int, lockstep: LockStep) -> None:
        """Take turns until every worker wants the same cut.

        Raises:
            FencedError: the controller has sent a newer command.
            UnavailableError: not all workers were asked in time, or a turn failed and this worker is broken.
        """
        ends_s = self.loop.clock.monotonic_s() + _AGREE_S
        try:
            while lockstep.turn(cut=seq, leaving=self.leaving).cut != seq:
                if self._heard >= (self.incarnation, seq):
                    raise FencedError(f"commit {seq} was aborted before all workers cut for it")
                if self.loop.clock.monotonic_s() >= ends_s:
                    raise RoostreamError(
                        f"the other workers did not agree to cut for commit {seq} within {_AGREE_S:g} s"
                    )
        except UnavailableError as error:
            self._break_after(error)
            raise

    def _resume(self, command: Command) -> dict[str, Any]:
        self._snapshot_for(command)
        self._continue()
        return {}

    def _write(self, command: Command) -> dict[str, Any]:
        """Store the worker's part of the snapshot, and with `shared` the model. Runs while training
        continues."""
        seq, at = self._snapshot_for(command)
        incarnation = int(command["incarnation"])
        metadata = {
            "schema": f"{self.loop.schema.fingerprint:016x}",
            "seq": str(seq),
            "incarnation": str(incarnation),
            "step": str(at.step),
        }
        name = manifests.worker_name(seq, incarnation, self.index)
        name_of_ids = manifests.worker_ids_name(seq, incarnation, self.index)
        stored = store_ids(at.partitions, lambda data: manifests.store_file(self.store, name_of_ids, data))
        own = manifests.store_file(self.store, name, encode_partitions(stored, metadata))
        self._stored = seq, stored
        metrics = metrics_of_snapshots(stored.values(), self.loop.schema.labels)
        several = self.lockstep is not None
        result = {
            "own": dataclasses.asdict(own),
            "id_files": [dataclasses.asdict(file) for file in id_files(stored)],
            "dedupe": sum(part.dedupe.num_ids for part in stored.values()),
            "metrics": metrics.mergeable_summary(SHARED_SCORES) if several else summarize(metrics.report()),
        }
        if not command.get("shared"):
            return result
        self.on_write()
        model = json.dumps(dataclasses.asdict(self.loop.model_config), sort_keys=True)
        shared = tensor_file.encode(
            at.shared, {"model": model, "precision": self.loop.config.precision, **metadata}
        )
        dense = manifests.store_file(self.store, manifests.dense_name(seq, incarnation), shared)
        return {**result, "dense": dataclasses.asdict(dense)}

    def _commit(self, command: Command) -> dict[str, Any]:
        seq, at = self._snapshot_for(command)
        if self._stored[0] == seq:
            self.loop.partitions.committed(self._stored[1])
        self.committed_step, self._snapshot, self._stored = at.step, None, (0, {})
        self.read_bounds.extend(command.get("epoch"))
        return {}

    def _abort(self, command: Command) -> dict[str, Any]:
        """Drop the snapshot of this commit, or refuse its cut if that arrives later."""
        self._aborted = max(self._aborted, int(command["seq"]))
        if self._snapshot is not None and self._snapshot[0] <= self._aborted:
            self._snapshot = None
            self._continue()
        return {}

    def _continue(self) -> None:
        self.training = not self.broken
        if self._cut_s is not None:
            self.loop.stages.add("commit", self.loop.clock.monotonic_s() - self._cut_s)
            self._cut_s = None

    def _snapshot_for(self, command: Command) -> tuple[int, Snapshot]:
        snapshot = self._snapshot
        if snapshot is None or snapshot[0] != int(command["seq"]):
            raise RoostreamError(
                f"expected the snapshot of commit {command['seq']}, "
                f"got that of {snapshot[0] if snapshot else 'none'}"
            )
        return snapshot

    def _check(self, manifest: Manifest) -> None:
        """Raises ConfigError: the commit is intact but belongs to other settings; an older manifest does not
        help."""
        self.identity.check(manifest)
        configured = dataclasses.asdict(self.loop.model_config)
        committed = dataclasses.asdict(model_config_from_dict(manifest.model))
        for part in ADDED_PARTS:  # a commit of before: the part is added (dense_checkpoint.py)
            if part in configured and part not in manifest.model:
                committed[part] = configured[part]
        if committed != configured:
            is_same_kind = committed["kind"] == configured["kind"]  # other kinds have other settings
            differing = (
                [k for k in configured if configured[k] != committed.get(k)] if is_same_kind else ["kind"]
            )
            expected = ", ".join(f"{k} = {committed.get(k)}" for k in differing)
            got = ", ".join(f"{k} = {configured[k]}" for k in differing)
            raise ConfigError(
                f"{manifest.name}: expected the model's {expected}, got {got}; "
                "use the committed model TOML, or start over with `roostream reset`"
            )

    def _check_or_exit(self, check: Callable[[], None]) -> None:
        """Run a check; if it fails, no restart helps and the worker must exit."""
        try:
            check()
        except ConfigError as error:
            self.refusal = error
            raise

    def _read(self, manifest: Manifest) -> Snapshot:
        """Read the shared part, and the state of this worker's current partitions from all workers' parts."""
        shared, _ = tensor_file.decode(manifests.read_file(self.store, manifest.dense))
        read = self.loop.source.positions()
        own_partitions = {*read, *((CORRECTIONS, number) for _, number in read)}  # see PartitionStates.load
        partitions: dict[Partition, PartitionSnapshot] = {}
        has_grown = manifest.num_partitions < self.identity.num_partitions
        for part in manifest.workers.values():
            if has_grown or own_partitions & part.offsets.keys():
                partitions |= read_partitions(self.store, part, None if has_grown else own_partitions)
        if has_grown:
            partitions = with_new_partitions(partitions, own_partitions)
        return Snapshot(
            shared=shared, step=manifest.step, watermark_ms=manifest.watermark_ms, partitions=partitions
        )
