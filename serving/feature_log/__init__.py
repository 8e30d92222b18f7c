"""The feature log: what was scored, mapped files that survive a kill, sent to Kafka in order. Knows nothing of serving."""
