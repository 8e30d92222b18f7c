"""The product executes no data as code and does not swallow errors silently."""

from __future__ import annotations

import ast

import pytest

from tests.contract.source_tree import FOLDERS, relative_path, sources

MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "telnetlib"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "torch.load",
    "torch.jit.load",
    "os.system",
    "os.popen",
    "yaml.load",
    "numpy.fromregex",
}
SILENT = "silently swallowed exception"


def violations(source: str) -> list[tuple[int, str]]:
    """(line, violation) of a Python source."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append((node.lineno, str(node.module)))
        elif isinstance(node, ast.Call):
            found += [(node.lineno, violation) for violation in _forbidden_in_call(node)]
        elif isinstance(node, ast.ExceptHandler) and _is_silent(node):
            found.append((node.lineno, SILENT))
    return found


def _forbidden_in_call(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    wrong = [name] if name in CALLS else []
    for keyword in node.keywords:
        is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ("allow_pickle", "shell") and not is_false:
            wrong.append(f"{name}({keyword.arg}=…)")
    return wrong


def _is_silent(node: ast.ExceptHandler) -> bool:
    catches_all = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException", "ImportError")
    return catches_all and all(isinstance(statement, ast.Pass) for statement in node.body)


@pytest.mark.parametrize("folder", [*FOLDERS, "benchmarks"])
def test_the_product_has_no_forbidden_calls(folder: str) -> None:
    paths = sources(folder)
    wrong = [
        f"{relative_path(p)}:{line}: {violation}"
        for p in paths
        for line, violation in violations(p.read_text(encoding="utf-8"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import dumps",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "try:\n    import x\nexcept ImportError:\n    pass",
        "try:\n    f()\nexcept:\n    pass",
    ],
)
def test_the_scan_finds_violations(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source", ["import numpy as np\nnp.load('x', allow_pickle=False)", "model.eval()", "re.compile('x')"]
)
def test_the_scan_accepts_harmless_calls(source: str) -> None:
    assert not violations(source)
