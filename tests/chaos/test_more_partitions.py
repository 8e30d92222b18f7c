"""Partitions added to a running deployment are reported within a minute and read after a restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from confluent_kafka.admin import NewPartitions

from infra.stack import Stack
from roostream.cli.status import StackMonitor
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import SAMPLES, TopicSettings, name_of
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, newest, quick_options, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


def test_an_added_partition_is_reported_and_then_read_without_loss_or_repetition(tmp_path: Path) -> None:
    options = quick_options()
    assert options.partitions == 4
    with Stack(tmp_path, options) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)
        admin, samples = clients.admin(Broker(stack.endpoints.kafka)), name_of(stack.prefix, SAMPLES)
        added = admin.create_partitions([NewPartitions(samples, 5)], request_timeout=20)
        clients.results_of(added, 40)
        described = stack.home.read_stack()
        assert described is not None
        monitor = StackMonitor(described)
        wait_until(
            "the added partition in the status",
            lambda: f"topic {samples}" in monitor.sample(described["programs"])["troubles"],
            60,
        )
        monitor.close()
        assert TopicAdmin(admin, stack.prefix, 5, TopicSettings()).grow()
        before = applied(stack)

    with Stack(tmp_path, dataclasses.replace(options, partitions=5)) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=240)
        wait_until("50 more trained samples", lambda: applied(stack) >= before + 50, 300)
        check_nothing_lost_or_twice(stack, within_s=240)
        manifest = newest(stack)
        assert manifest is not None and manifest.num_partitions == 5
        assert manifest.offsets[SAMPLES, 4] > 0
