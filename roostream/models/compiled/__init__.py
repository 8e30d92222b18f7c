"""Compiled scoring of the default ranker in serving: one kernel instead of one call per torch module.

Other code uses `scorer.build_scorer` only. docs/decisions/0103 has the measurements against plain torch and
ONNX Runtime.
"""
