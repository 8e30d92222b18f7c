"""Online features: histories and counters kept in Redis from the event topics, and how a reader gets them."""
