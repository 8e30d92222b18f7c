"""Sizes that bound every Kafka message."""

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message, with key and headers: topics, producers and programs have the same limit."""
RECORD_OVERHEAD_BYTES = 4 << 10
"""Part of a message that is not its value: key, headers and the batch around it."""
