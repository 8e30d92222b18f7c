"""What set-up puts into `build/`: jars of the broker, of Flink's Kafka connector and of the compiler, and our operator's jar."""

from __future__ import annotations

from infra.options import ROOT

BUILD = ROOT / "build"
JARS = BUILD / "jars"
KAFKA_JARS = JARS / "kafka"
CONNECTOR_JARS = JARS / "flink"
COMPILER_JARS = JARS / "compiler"
OPERATOR_JAR = BUILD / "roostream-flink.jar"
STAMPS = BUILD / "stamps"
