"""`roostream init`: write a schema and a model for a log, or for a sample log."""
