"""Online features: what is kept of entities' events, and what a request reads of it."""
