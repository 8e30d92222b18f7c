"""Kafka: clients with our settings, topics, and the one reader of records."""
