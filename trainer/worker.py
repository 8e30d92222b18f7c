"""A member of the controller around the training loop: restore, start, cut, resume, write, commit, abort.

    restore ──► start ──► training ──► cut ──► paused ──► resume ──► training
                              │                   write the snapshot meanwhile, commit or abort ends it
                              └─ a shard is away, or Kafka refused a prediction: broken, told with the next beat; everyone is
                                 restored, and what was refused is sent again

The loop runs in the caller's thread; commands arrive on the member's thread and are done between two batches, except `write`,
which works on the snapshot and lets training go on. One of several workers cuts when all do: it takes turns until then
(lockstep.py), and a wait for the others is ended by what the member hears meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from roostream.errors import ConfigError, FencedError, RoostreamError, UnavailableError, describe_error
from roostream.models.build import model_config_from_dict
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.controller_agent import check_command_schema
from roostream.runtime.kafka.topics import CORRECTIONS, Partition, nested
from roostream.runtime.manifest import Manifest
from roostream.runtime.work_unit import TableInput
from trainer import worker_file
from trainer.deployment_identity import DeploymentIdentity
from trainer.failure_policy import FailurePolicy
from trainer.lockstep import LockStep
from trainer.loop import Snapshot, TrainLoop
from trainer.monitoring.progressive_metrics import summarize
from trainer.partitions import PartitionSnapshot, report_of
from trainer.predictions import DurableOutputs
from trainer.process_group import SINGLE_WORKER, GroupSpec, ProcessGroup, Rendezvous, SingleWorkerGroup
from trainer.read_bounds import ReadBounds

log = logging.getLogger("roostream.worker")

Command = dict[str, Any]
_IDLE_S = 0.1
_AGREE_S = 30.0  # below what the controller gives a step of a commit


class Worker:
    """`execute` is a command's whole effect and result; `turn` is a batch. Both in the loop's thread, but `execute("write")`."""

    def __init__(
        self,
        loop: TrainLoop,
        outputs: DurableOutputs,
        store: CheckpointStore,
        identity: DeploymentIdentity,
        index: int = 0,
        team: Rendezvous = SINGLE_WORKER,
    ) -> None:
        """`outputs`: those of the loop; `team`: how it sums with other workers."""
        self.loop, self.outputs, self.store, self.identity, self.index = loop, outputs, store, identity, index
        self.team = team
        self.reduction: ProcessGroup = SingleWorkerGroup()
        self.lockstep: LockStep | None = None  # with other workers
        self.reach = ReadBounds(loop)
        self.incarnation = 0
        self.training = False
        self.broken = ""  # why this incarnation can't go on
        self.fatal = ""  # why none can, however often everyone is restored
        self.committed_step = 0
        self.breaks = FailurePolicy(loop, index)
        self.on_write: Callable[[], None] = lambda: (
            None
        )  # beside a commit, in the member's thread; it may not raise
        self.leaving = False  # stopping: trains no more, asks for a commit, then goes
        self._snapshot: tuple[int, Snapshot] | None = None
        self._cut_s: float | None = None  # since when training waits for a commit
        self._aborted = 0  # seq; a cut that comes after its abort is refused
        self._heard = (
            0,
            0,
        )  # the newest incarnation to be restored to, and of it the newest commit to be aborted
        self.refusal: ConfigError | None = (
            None  # of what is committed, which no restart mends; `turn` raises it
        )
        self._inbox: queue.SimpleQueue[tuple[Command, concurrent.futures.Future[dict[str, Any]]]] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()

    def execute(self, command: Command) -> dict[str, Any]:
        """Do one command; its result's fields.

        Raises:
            CheckpointError: what it needs is damaged or absent: an older manifest may do.
            ConfigError: what is committed belongs to other settings; the next `turn` raises it too, and the worker exits.
            RoostreamError: it can't be done now.

        **If it fails:** a failed restore leaves the loop stopped until the next one; a failed cut has let training go on.
        """
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
        """Train on the next batch, if training and if there is one.

        Raises:
            ConfigError: what is committed can't be used by this worker (its schema, its Kafka); it must exit.
        """
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
            self._break_of(error)
            return False
        except Exception as error:
            if not is_out_of_memory(
                error
            ):  # whoever supervises starts the worker again, and it may die again
                self.breaks.save(f"{error!r:.1000}")
                raise
            self.fatal = f"out of memory: {str(error) or 'no reason given':.300}; give it more, or lower batch_requests"
            self._break(self.fatal)
            return False

    @property
    def is_cut(self) -> bool:
        """A commit is under way, from the cut to its commit or abort."""
        return self._snapshot is not None

    def can_leave(self) -> bool:
        """Nothing trained would be lost by stopping now."""
        return not self.is_cut and (not self.training or self.loop.num_steps == self.committed_step)

    def _break(self, reason: str) -> None:
        log.warning("training stops until everyone is restored: %s", reason)
        self.training, self.broken = False, reason
        self.reduction.leave()

    def _break_of(self, error: RoostreamError) -> None:
        self.fatal = self.breaks.broke(error)
        self._break(self.fatal or describe_error(error) or "a shard is away")

    def report(self) -> dict[str, Any]:
        """What every beat carries; cheap, read from another thread."""
        return {
            "step": self.loop.num_steps,
            "watermark_ms": self.loop.watermark_ms,
            "training": self.training,
            "broken": self.broken,
            "fatal": self.fatal,
            "leaving": self.leaving,
            "saved": self.breaks.saved,
            "meet": self.team.address,
            **self.reach.report(),
            **dataclasses.asdict(self.loop.counts),
            "outcomes": dict(self.loop.outcomes.total),
            "duplicates": self.loop.own.num_skipped,
        }

    # Called from two threads

    def submit(self, command: Command) -> dict[str, Any]:
        """`execute` for the member's thread: by the loop's thread between two batches, or here if it needs no pause."""
        if command["kind"] == "write":
            return self.execute(command)
        self.hear(command)
        done: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._inbox.put((command, done))
        while not self._closed.is_set():
            try:
                return done.result(timeout=0.5)
            except concurrent.futures.TimeoutError:
                continue
        raise UnavailableError("the worker is stopping")

    def hear(self, command: Command) -> None:
        """As soon as a command is known, before those in front of it are done: it may end what they wait for. Any thread."""
        incarnation, kind = int(command["incarnation"]), command["kind"]
        if kind == "restore":
            self._heard = max(self._heard, (incarnation, 0))
            self.outputs.interrupt()  # the loop may be waiting for room
            self.reduction.interrupt()
        elif kind == "abort":
            self._heard = max(self._heard, (incarnation, int(command["seq"])))

    def serve_inbox(self) -> None:
        """In the loop's thread: do what was submitted; waits a little when there is nothing to train on."""
        while True:
            try:
                command, done = self._inbox.get(block=not self.training or self.leaving, timeout=_IDLE_S)
            except queue.Empty:
                return
            try:
                done.set_result(self.execute(command))
            except Exception as error:  # whoever submitted it decides
                done.set_exception(error)

    def close(self) -> None:
        self._closed.set()

    # Commands

    def _restore(self, command: Command) -> dict[str, Any]:
        self.training, self._snapshot, self._aborted = False, None, 0
        self.broken = "restoring"
        self.outputs.begin()
        self.reduction.leave()
        self.reach.clear()
        check_command_schema(command, self.loop.schema.fingerprint)
        if "partitions" in command:
            self.loop.assign(
                [int(number) for number in command["partitions"]], TableInput.of(command.get("input"))
            )
        name = str(command.get("manifest", ""))
        manifest, checksum = manifests.load(self.store, name) if name else (None, "")
        if manifest and manifest.input != TableInput.of(command.get("input")):
            raise FencedError(
                f"expected what {name} was trained from, got another input: its offsets would mean something else"
            )
        self.breaks.restored(int(command["incarnation"]), name, checksum)
        if manifest:
            self._or_refuse(partial(self._check, manifest))
            self.loop.restore(
                self._read(manifest), same_schema=manifest.schema == f"{self.loop.schema.fingerprint:016x}"
            )
        else:
            self.loop.reset()
        self.committed_step = self.loop.num_steps
        self.incarnation = int(command["incarnation"])
        workers = int(command.get("workers", 1))
        self._or_refuse(lambda: self.loop.selection.validate(workers=workers))
        self.reduction = self.team.join(
            GroupSpec(self.incarnation, self.index, workers, str(command.get("meet", "")))
        )
        self.lockstep = LockStep(self.loop, self.reduction, self.reach) if workers > 1 else None
        self.loop.rows.set_incarnation(self.incarnation, workers, manifest.owners if manifest else None)
        self.broken = ""
        log.info("restored %s, step %d", name or "to the beginning", self.loop.num_steps)
        return {}

    def _start(self, command: Command) -> dict[str, Any]:
        self.reach.begin(command.get("epoch"))
        reach = self.reach
        self._or_refuse(
            lambda: self.loop.selection.begin_phase(finite=reach.is_initial, handed_over=reach.phased)
        )
        self.training = True
        return {}

    def _cut(self, command: Command) -> dict[str, Any]:
        """The batch in hand is finished and every push acknowledged, since this runs between two batches; of several workers
        all cut behind the same turn."""
        if int(command["seq"]) <= self._aborted:
            raise FencedError(
                f"expected a commit above {self._aborted} to cut, got {command['seq']}: it was aborted"
            )
        if self.broken or not self.training:
            raise RoostreamError(
                f"expected a training worker to cut, got one that isn't ({self.broken or 'not started'})"
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
        self.reach.settle()
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
        """Turns until every worker has been asked for the same cut.

        Raises:
            FencedError: the controller wants something else by now.
            UnavailableError: not all were asked in time, or the turns ended: then this worker is broken.
        """
        ends_s = self.loop.clock.monotonic_s() + _AGREE_S
        try:
            while lockstep.turn(cut=seq, leaving=self.leaving).cut != seq:
                if self._heard >= (self.incarnation, seq):
                    raise FencedError(f"commit {seq} was given up before all workers cut for it")
                if self.loop.clock.monotonic_s() >= ends_s:
                    raise RoostreamError(
                        f"the other workers were not asked to cut for commit {seq} within {_AGREE_S:g} s"
                    )
        except UnavailableError as error:
            self._break_of(error)
            raise

    def _resume(self, command: Command) -> dict[str, Any]:
        self._cut_of(command)
        self._go_on()
        return {}

    def _write(self, command: Command) -> dict[str, Any]:
        """The worker's own part; with `shared`, the model's too. What takes time is done here, beside training, from the cut."""
        seq, at = self._cut_of(command)
        incarnation = int(command["incarnation"])
        metadata = {
            "schema": f"{self.loop.schema.fingerprint:016x}",
            "seq": str(seq),
            "incarnation": str(incarnation),
            "step": str(at.step),
        }
        name = manifests.worker_name(seq, incarnation, self.index)
        own = manifests.store_file(self.store, name, worker_file.encode(at.own, metadata))
        result = {
            "own": dataclasses.asdict(own),
            "dedupe": sum(len(cut.tensors["dedupe.id"]) for cut in at.own.values()),
            "metrics": summarize(report_of(at.own.values(), self.loop.schema.tasks)),
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
        _, at = self._cut_of(command)
        self.committed_step, self._snapshot = at.step, None
        self.reach.extend(command.get("epoch"))
        return {}

    def _abort(self, command: Command) -> dict[str, Any]:
        """Ends whatever is cut up to this commit, and is remembered."""
        self._aborted = max(self._aborted, int(command["seq"]))
        if self._snapshot is not None and self._snapshot[0] <= self._aborted:
            self._snapshot = None
            self._go_on()
        return {}

    def _go_on(self) -> None:
        self.training = not self.broken
        if self._cut_s is not None:
            self.loop.stages.add("commit", self.loop.clock.monotonic_s() - self._cut_s)
            self._cut_s = None

    def _cut_of(self, command: Command) -> tuple[int, Snapshot]:
        snapshot = self._snapshot
        if snapshot is None or snapshot[0] != int(command["seq"]):
            raise RoostreamError(
                f"expected the cut of commit {command['seq']}, got {snapshot[0] if snapshot else 'none'}"
            )
        return snapshot

    def _check(self, manifest: Manifest) -> None:
        """Raises ConfigError: what isn't damaged but belongs to others; an older manifest can't mend it."""
        self.identity.check(manifest)
        mine = dataclasses.asdict(self.loop.model_config)
        committed = dataclasses.asdict(model_config_from_dict(manifest.model))
        if committed != mine:
            differing = sorted(k for k in {*mine, *committed} if mine.get(k) != committed.get(k))
            raise ConfigError(
                f"{manifest.name}: expected the model's {', '.join(f'{k} = {committed.get(k)}' for k in differing)}, "
                f"got {', '.join(f'{mine.get(k)}' for k in differing)}; use the committed model TOML, or begin anew"
            )

    def _or_refuse(self, check: Callable[[], None]) -> None:
        """What the check refuses no restart mends: the worker must exit."""
        try:
            check()
        except ConfigError as error:
            self.refusal = error
            raise

    def _read(self, manifest: Manifest) -> Snapshot:
        """The shared part, and of every worker's what is of this one's partitions now."""
        shared, _ = tensor_file.decode(manifests.read_file(self.store, manifest.dense))
        read = self.loop.source.positions()
        mine = {
            *read,
            *((CORRECTIONS, number) for _, number in read),
        }  # also where they aren't read: see Partitions.load
        own: dict[Partition, PartitionSnapshot] = {}
        for part in manifest.workers.values():
            if mine & part.offsets.keys():
                cuts = worker_file.decode(manifests.read_file(self.store, part.file), part.offsets)
                own |= {partition: cuts[partition] for partition in mine & cuts.keys()}
        return Snapshot(shared=shared, step=manifest.step, watermark_ms=manifest.watermark_ms, own=own)


def is_out_of_memory(error: Exception) -> bool:
    """Of the host or of a device: the same batch fails again after every restart."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
