"""An upgrade of the broker's minor version while all programs run. The new broker continues with the old
data: nothing is lost or trained twice, and every request is answered. Then the metadata version is raised,
which cannot be undone."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import kafka_broker
from infra.jars import BUILD, KAFKA_JARS, Jar, fetch_all, find_java, read_list
from infra.stack import Stack
from roostream.errors import SetupError
from tests.chaos.day_two import RequestSender
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

OLD_VERSION = "4.1.1"
_OF_KAFKA = "org.apache.kafka"
SHA256 = {
    "kafka-clients": "00247122a572c3d3ae4eb60a50192a5811bc0181f51923d13018600f892e821d",
    "kafka-coordinator-common": "2072fc1ce7e0505149bba22a463a5909a899c6235c4fa696f15c21194a7baf60",
    "kafka-group-coordinator-api": "3d1801d2329dcf7d273796a034d61e6c7e0f851f384d0afbdd3a2e6cbd17a968",
    "kafka-group-coordinator": "3eb5a673b69d5992cfa86c5436f39adbf4ce284046a4c999ec6af0a8e31c5589",
    "kafka-metadata": "a689665751415b6456de1ecb013042cb7ba99ac68fd8c3e8bf28e098feb43218",
    "kafka-raft": "4810c93d93d1935dd54de61c5ba130f501c7fe11bc49ccd3ee05ec857818a72a",
    "kafka-server-common": "207edecd8322cf6c13d76d84addea7fd0ec441dc8d698cf69df43210ccdc0a94",
    "kafka-server": "9f6aff422855491aad54326eca8d604163d6d3a6507cc48ffe3ce6de73caf79a",
    "kafka-share-coordinator": "e6bec53428c77bf6579321836d482542a93575f7c08e860a26c9f2c7f6059dac",
    "kafka-storage-api": "8c0a712472185d706c6bf5ae24bf5d84a8e396fd4745c708e6146a415f7fa7f7",
    "kafka-storage": "1f85b82853eaec0143efbef7e3a4d4be8929ff83a386326431e0c2d0a557e58c",
    "kafka-tools": "8a6939f310a61119cedaffc144119e9b2a374e32a7ec18f78e49ce5aeb71d6b0",
    "kafka-transaction-coordinator": "a261b5730ac9e3205df7af5d45180d851e9d5f729ce1275c67511a6f51f73755",
    "kafka_2.13": "e89428126cc7630a802123ba27aac4442816840b66d60670226feaff65f24fd1",
}
"""Artifact → SHA-256 of the broker's jar of that version."""


def old_jars() -> Path:
    """A folder in `build/` with Kafka's own jars of the old version and links to the dependencies, which both
    versions share."""
    folder = BUILD / f"jars-{OLD_VERSION}"
    wanted = [
        Jar(SHA256[jar.artifact], 0, _OF_KAFKA, jar.artifact, OLD_VERSION)
        for jar in read_list()
        if jar.group == _OF_KAFKA
    ]
    try:
        fetch_all([jar for jar in wanted if not jar.path(folder).exists()], folder)
    except SetupError as error:
        pytest.skip(f"Kafka {OLD_VERSION} can't be had here: {error}")
    jar_folder = folder / KAFKA_JARS.name
    for jar in KAFKA_JARS.glob("*.jar"):
        if not jar.name.startswith(("kafka-", "kafka_")) and not (jar_folder / jar.name).exists():
            (jar_folder / jar.name).symlink_to(jar)
    return jar_folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack on a broker of the old version."""
    running = Stack(tmp_path_factory.mktemp("minor"), quick_options())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kafka_broker, "KAFKA_JARS", old_jars())
        running.open()
    try:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=180)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running
    finally:
        running.stop()


def run_feature_command(stack: Stack, *arguments: str) -> str:
    """Run Kafka's tool for the features of a cluster and return its output."""
    quiet = stack.home.conf / "kafka-log4j2.properties"
    command = (str(find_java()), f"-Dlog4j2.configurationFile={quiet}", "-cp", f"{KAFKA_JARS}/*")
    tool = ("org.apache.kafka.tools.FeatureCommand", "--bootstrap-server", stack.endpoints.kafka, *arguments)
    return subprocess.run((*command, *tool), capture_output=True, text=True, check=True, timeout=240).stdout


def metadata_of(stack: Stack) -> str:
    """The cluster's metadata version, such as 4.2-IV1."""
    (line,) = [
        line for line in run_feature_command(stack, "describe").splitlines() if "metadata.version" in line
    ]
    return line.partition("FinalizedVersionLevel: ")[2].split()[0]


def test_a_broker_of_the_next_minor_version_continues_with_the_same_data(stack: Stack) -> None:
    assert metadata_of(stack).startswith("4.1")
    sender, before = RequestSender(stack.home), applied(stack)
    began_s = time.monotonic()
    stack.stop_program("kafka")
    kafka = stack.programs["kafka"]
    command = tuple(part.replace(f"jars-{OLD_VERSION}/", "jars/") for part in kafka.command)
    assert command != kafka.command and f"{KAFKA_JARS}/*" in command
    stack.programs["kafka"] = dataclasses.replace(kafka, command=command)
    stack.start(["kafka"])
    stack.wait_ready("kafka", 90)
    away_s = time.monotonic() - began_s
    wait_until("60 more samples committed", lambda: applied(stack) >= before + 60, 180)
    trained_s = time.monotonic() - began_s
    sender.stop()
    print(
        f"Kafka was away for {away_s:.1f} s; 60 samples more were committed {trained_s:.1f} s after its end"
    )
    print(f"asked {sender.num_sent}, never answered {len(sender.failed)}")
    assert sender.num_sent > 20 and sender.failed == []
    assert metadata_of(stack).startswith("4.1"), "the metadata version may not change by itself"


def test_the_version_of_the_metadata_follows(stack: Stack) -> None:
    run_feature_command(stack, "upgrade", "--release-version", "4.2-IV1")
    assert metadata_of(stack) == "4.2-IV1"
    before = applied(stack)
    wait_until("60 more samples committed", lambda: applied(stack) >= before + 60, 120)


def test_nothing_was_lost_and_nothing_was_trained_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack)
