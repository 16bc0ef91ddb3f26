"""What ruff does not check of the library's style."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "towers"


def functions():
    """Yield the place and the number of lines of each function."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}, {lines}", lines


def test_a_function_is_seen_at_one_glance():
    assert len(list(functions())) > 100
    assert [place for place, lines in functions() if lines > 60] == []
