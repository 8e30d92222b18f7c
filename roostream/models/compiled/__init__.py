"""Compiled scoring of the default ranker in serving: one kernel instead of one call per torch module.

Other code uses `scorer.build_scorer` only. docs/decisions/0103 has the measurements against plain torch and
ONNX Runtime.

    scorer.py        chooses the compiled scorer or torch for a model, and runs a batch
    tape.py          modules and parameters of a ranker → operations and one array of weights
    interpreter.py   the kernel that runs the operations, and kernels that write its inputs
"""
