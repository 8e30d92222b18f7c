"""The `roostream` command: its sub-commands, and what only they do (status, audit, replay)."""
