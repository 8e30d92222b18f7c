"""The Open Inference Protocol, version 2 (KServe, Triton): the same ranks under another spelling (docs/http.md)."""
