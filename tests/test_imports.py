"""Which module may import which: read from the source."""

import ast
import functools
import importlib.util
import re
import sys

import pytest

from tests.programs import ROOT

pytestmark = pytest.mark.unit

PACKAGE = ROOT / "towers"

# A room imports from itself and from those before it; the files of the top row, which any room may
# import, from none but each other. These three may import any room.
ROOMS = "options builder devices workers data graphs monitoring training commands".split()
DOORS = {"__init__", "__main__", "cli"}

# The packages that setup.py installs, by the names they are imported under.
INSTALLED = set("PIL absl keras numpy packaging pynvml tensorboard tensorflow".split())


@functools.cache
def imported_names(path, everywhere=True):
    """Return the dotted names that a file imports; `from a import b` gives a.b.

    Without `everywhere` the imports inside functions, which run later, are left out, and so are
    those of models from beside them.
    """
    names, nodes = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert PACKAGE not in path.parents, f"{path}: name the whole module"
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes.extend(ast.iter_child_nodes(node))
    return names


def imports_of_towers(everywhere=True):
    """Return {module: the dotted names it imports}; modules are named as data.augment."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")}
    return {
        ".".join(p.parts[:-1] if len(p.parts) > 1 and p.name == "__init__" else p.parts):
            imported_names(path, everywhere)
        for path, p in sorted(paths.items())
    }  # fmt: skip


def internal_edges():
    """Return {module: the modules of towers it imports}, without the lazy towers/__init__."""
    imports = imports_of_towers()
    edges = {}
    for module, names in imports.items():
        names = {name.removeprefix("towers.") for name in names if name.startswith("towers.")}
        found = {name if name in imports else name.rpartition(".")[0] for name in names}
        edges[module] = (found & set(imports)) - {module, "__init__"}
    del edges["__init__"]
    return edges


def place(module):
    """Return where a module is in the house: its room, -1 for the top row, and its verb."""
    room, _, rest = module.partition(".")
    if room not in ROOMS:
        return -1, ""
    return ROOMS.index(room), rest.partition(".")[0] if room == "commands" else ""


def reachable(module, edges):
    found, waiting = set(), [module]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def top_level(names):
    return {name.split(".")[0] for name in names}


def test_a_room_imports_only_from_those_above_it_and_no_verb_another():
    wrong, edges = [], internal_edges()
    assert len(edges) > 50
    for module, others in edges.items():
        for other in sorted(others):
            (room, verb), (other_room, other_verb) = place(module), place(other)
            if module not in DOORS and (other_room > room or other in DOORS):
                wrong.append(f"{module} imports {other}, which stands below it")
            if verb and other_verb and verb != other_verb:
                wrong.append(f"{module} imports {other}, of another verb")
    assert not wrong, "\n".join(wrong)


def test_the_house_has_nine_rooms():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sorted(path.name for path in entries if path.is_dir()) == sorted(ROOMS)
    assert len([path for path in entries if path.suffix == ".py"]) <= 8
    assert [room for room in ROOMS if not (PACKAGE / room / "README.md").is_file()] == []


def test_no_modules_import_each_other():
    edges = internal_edges()
    assert [module for module in sorted(edges) if module in reachable(module, edges)] == []


def test_the_pattern_is_read_without_the_rest_of_the_house():
    found = reachable("builder.tower", internal_edges())
    outside = {module for module in found if not module.startswith("builder")}
    assert outside == {"errors", "tf_internals"}


def test_the_step_is_read_without_the_set_up():
    found = reachable("training.step.step", internal_edges())
    assert not [
        module for module in found if module.startswith(("options", "data", "training.run"))
    ]
    assert len(found) <= 26, sorted(found)  # 25 to know for who changes the step


def test_modules_that_programs_in_strings_import_are_there():
    """No other test sees some of those: they are run by hand."""
    paths = [path for top in ("scripts", "tests") for path in (ROOT / top).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    named = set(re.findall(r"(?:from|-m\",?) \"?(towers[\w.]+)", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if importlib.util.find_spec(name) is None] == []


def test_only_what_sets_up_a_run_or_shows_all_flags_has_all_options():
    """The rest is given the part of them that it reads, such as `UpdateOptions`."""
    rooms = "options", "commands", "training.run"
    files = "cli", "training.train", "training.evaluate", "training.load"
    for module, names in imports_of_towers().items():
        if "towers.options.run.Options" in names:
            named = module in (*files, "monitoring.dashboard") or module.startswith(rooms)
            assert named, f"{module}: take a class of towers.options.parts"


def test_the_library_knows_no_model_and_no_experiment():
    for module, names in imports_of_towers().items():
        assert not top_level(names) & {"models", "configs", "scripts", "tests"}, module


def test_the_library_imports_what_is_installed_with_it():
    for module, names in imports_of_towers(everywhere=False).items():
        unknown = top_level(names) - INSTALLED - set(sys.stdlib_module_names) - {"towers"}
        assert not unknown, f"{module} imports {unknown}"


def test_models_import_keras_tensorflow_and_their_parts_only():
    paths = sorted((ROOT / "models").rglob("*.py"))
    assert paths
    for path in paths:
        others = top_level(imported_names(path)) - sys.stdlib_module_names
        assert others <= {"keras", "tensorflow"}, path.name
