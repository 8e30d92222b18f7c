"""Who may do what on serving's ports: bearer keys with scopes, TLS (docs/operations/access.md)."""
