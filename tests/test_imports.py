"""Which module may import which: read from the source, so that nothing need be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "towers"

# Each imports only from those before it, directly or by way of a module that is not named here.
ORDER = (
    "collectives tower devices data placement step checkpoint monitor evaluate train verify "
    "benchmark plan doctor cluster flags cli __main__"
).split()

# The packages that setup.py installs, by the names they are imported under.
INSTALLED = {"PIL", "absl", "keras", "numpy", "pynvml", "tensorboard", "tensorflow", "tqdm"}


def imported_names(path, package="", everywhere=True):
    """Return the dotted names that a file imports.

    `from a import b` gives a.b. `package` is what relative imports start from; without `everywhere`
    the imports inside functions, which run later, are left out.
    """
    names = set()
    nodes = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            start = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
        elif not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes.extend(ast.iter_child_nodes(node))
    return names


def module_of(path):
    """Return the module or subpackage of towers that a file belongs to: data for data/augment."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of_towers(everywhere=True):
    """Return {module: the dotted names it imports}."""
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        names = imported_names(path, package, everywhere)
        result.setdefault(module_of(path), set()).update(names)
    return result


def internal_edges(everywhere=True):
    """Return {module: the modules of towers it imports}, without the lazy towers/__init__."""
    imports = imports_of_towers(everywhere)
    edges = {}
    for module, names in imports.items():
        targets = {name.split(".")[1] for name in names if name.startswith("towers.")}
        edges[module] = (targets & set(imports)) - {module, "__init__"}
    del edges["__init__"]
    return edges


def reachable(module, edges):
    found, waiting = set(), [module]
    while waiting:
        for target in edges[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def top_level(names):
    return {name.split(".")[0] for name in names}


def test_the_imports_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import a.b as c\nfrom d import e, f\nfrom . import g\nfrom ..h import i\n"
        "if True:\n    import j\nclass K:\n    def k(self):\n        import l\n"
    )
    outside = {"a.b", "d.e", "d.f", "towers.data.g", "towers.h.i", "j"}
    assert imported_names(path, "towers.data", everywhere=False) == outside
    assert imported_names(path, "towers.data") == outside | {"l"}
    assert internal_edges(), "no module of towers was found"


def test_modules_import_only_from_those_above_them():
    edges = internal_edges()
    wrong = []
    for module in sorted(edges.keys() & set(ORDER)):
        below = reachable(module, edges) & set(ORDER[ORDER.index(module) :])
        wrong += [f"{module} imports {other}, which stands below it" for other in sorted(below)]
    assert not wrong, "; ".join(wrong)


def test_no_modules_import_each_other():
    edges = internal_edges()
    assert [module for module in sorted(edges) if module in reachable(module, edges)] == []


# What the tower builder stands on, and each of these: the pattern is to be read without the rest.
PATTERN = {
    "tower": "batch_norm compiled draws errors exchange gather layers rehearsal scope splitting "
    "tf_private",
    "batch_norm": "exchange scope tf_private",
    "collectives": "",
    "compiled": "errors exchange scope tf_private",
    "draws": "philox tf_private",
    "errors": "",
    "exchange": "errors tf_private",
    "gather": "collectives scope",
    "layers": "",
    "philox": "",
    "rehearsal": "draws errors layers scope stage tf_private",
    "scope": "errors tf_private",
    "splitting": "draws",
    "stage": "draws errors layers scope splitting tf_private",
    "tf_private": "",
}


def test_tower_needs_little_beside_itself():
    edges = internal_edges()
    found = reachable("tower", edges) | {"tower"}
    assert {module: " ".join(sorted(edges[module])) for module in found} == PATTERN


def test_the_library_knows_no_model_and_no_experiment():
    for module, names in imports_of_towers().items():
        assert not top_level(names) & {"models", "configs", "scripts", "tests"}, module


def test_the_library_imports_what_is_installed_with_it():
    for module, names in imports_of_towers(everywhere=False).items():
        unknown = top_level(names) - INSTALLED - set(sys.stdlib_module_names) - {"towers"}
        assert not unknown, f"{module} imports {unknown}"


def test_models_import_keras_and_tensorflow_only():
    paths = sorted((ROOT / "models").rglob("*.py"))
    assert paths
    for path in paths:
        assert top_level(imported_names(path, "models")) <= {"keras", "tensorflow"}, path.name


@pytest.mark.skipif(not (PACKAGE / "flags.py").exists(), reason="towers.flags is not there yet")
def test_flags_need_no_tensorflow():
    imports, edges = imports_of_towers(everywhere=False), internal_edges(everywhere=False)
    for module in {"__init__", "flags"} | reachable("flags", edges):
        assert not top_level(imports[module]) & {"keras", "tensorflow"}, module

    check = "import sys, towers, towers.flags; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0
