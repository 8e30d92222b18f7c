"""The joiner as an application: the `main` that a job manager of its own runs, `--config FILE`, where nobody submits anything.

1 the settings, from TOML and environment  2 the schema, in the store  3 the topics are there  4 the job
"""

from __future__ import annotations

import argparse
import sys

from joiner.config import JoinerConfig
from joiner.envelope import OUTPUTS
from joiner.job import build
from roo.config import load
from roo.errors import RoostreamError
from roo.schema_file import load_schema
from roo.schema_registry import register
from runtime.checkpoint_store import open_store
from runtime.flink_rest import JOB_NAME
from runtime.kafka.clients import wait_for_topics
from runtime.kafka.topics import EVENTS


def settings(arguments: list[str]) -> JoinerConfig:
    """Step 1. Raises ConfigError as `roo.config.load`, or when a key is empty that a job needs."""
    parser = argparse.ArgumentParser(description="The joiner's job, in the cluster whose job manager runs this.")
    parser.add_argument("--config", required=True, help="TOML of `roostream joiner`")
    config = load(JoinerConfig, parser.parse_args(arguments).config, program="joiner")
    config.require("bootstrap", "schema", "store")
    return config


def main() -> None:
    """Give the job to the cluster, or end with one sentence and code 2: whoever started the cluster sees it in its log."""
    try:
        config = settings(sys.argv[1:])
        register(open_store(config.store), load_schema(config.schema))
        wait_for_topics(config.broker, config.prefix, (*EVENTS, *OUTPUTS), config.partitions)
        job = build(config)
    except RoostreamError as error:
        print(f"error: joiner: {error}", file=sys.stderr)
        sys.exit(2)
    job.execute(JOB_NAME)
