"""The joiner as an application: the `main` that a job manager of its own runs, `--config FILE`, where nobody submits anything.

1 the settings, from TOML and environment  2 the schema, in the store  3 the topics are there  4 the job
"""

from __future__ import annotations

import argparse
import sys

from joiner.config import JoinerConfig
from joiner.envelope import OUTPUTS
from joiner.job import build
from roostream.errors import RoostreamError
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.flink_rest import JOB_NAME
from roostream.runtime.kafka.clients import wait_for_topics
from roostream.runtime.kafka.topics import EVENTS
from roostream.schema.registry import register
from roostream.schema.schema_file import load_schema
from roostream.schema.settings import load


def settings(arguments: list[str]) -> JoinerConfig:
    """Step 1. Raises ConfigError as `roostream.schema.settings.load`, or when a key is empty that a job needs."""
    parser = argparse.ArgumentParser(
        description="The joiner's job, in the cluster whose job manager runs this."
    )
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
