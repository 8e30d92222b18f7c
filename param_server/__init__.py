"""Embedding rows: where they live (`server`, `table`, `segments`), how they change (`rules`), how they get out (`publish`).

Others import `param_server.client` only. No torch here.
"""
