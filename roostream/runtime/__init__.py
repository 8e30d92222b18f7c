"""What every program needs around its logic, once: Kafka and Redis clients, backoff, clocks, calls, start and
stop, metrics."""
