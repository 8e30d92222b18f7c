"""Access control of serving's ports: bearer keys with scopes (docs/operations/security.md)."""
