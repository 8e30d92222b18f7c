"""Formats of the Open Inference Protocol, version 2 (KServe, Triton), for rank requests (docs/http.md)."""
