"""The feature log: memory-mapped files that survive a kill, sent to Kafka in order. It depends on nothing
else in serving."""
