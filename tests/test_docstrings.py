"""What docstrings say, read from the source."""

import ast
import re

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.unit

FILES = sorted((ROOT / "towers").rglob("*.py"))


def public_functions(tree):
    """Yield the functions and methods that other modules may call."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)
        elif isinstance(node, ast.FunctionDef):
            if not node.name.startswith("_") or node.name == "__init__":
                yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_public_function_with_several_parameters_describes_each(path):
    without = []
    for function in public_functions(ast.parse(path.read_text(encoding="utf-8"))):
        given = function.args
        names = {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        described = ast.get_docstring(function) or ""
        other = re.search(r"(?i)\b(see|like) `[\w.]+`", described)  # which describes them
        if len(names - {"self", "cls"}) > 1 and "Args:" not in described and not other:
            without.append(function.name)
    assert without == []
