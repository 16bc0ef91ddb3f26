"""What `pip install` brings, and the scripts that a person runs first."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from packaging.requirements import Requirement

import towers
from tests.programs import ROOT

pytestmark = pytest.mark.process

SCRIPTS = ["scripts/quickstart", "scripts/test", ".ci/run"]
TOP_LEVEL = "setup.py README.md pyproject.toml LICENSE towers models configs scripts tests".split()
TOP_LEVEL += [".gitignore", ".ci", "README.zh-CN.md", "CONTRIBUTING.md"]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".cifar10", ".*_cache", "__pycache__", "*.egg-info", "build", "dist"
)


def copy_checkout(target, names=TOP_LEVEL):
    """Copy what belongs to the project, not what was made in the checkout since."""
    target.mkdir(parents=True)
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=NOT_SOURCE)
        elif (ROOT / name).exists():
            shutil.copy2(ROOT / name, target / name)
    return target


def build(checkout, target, *arguments):
    """Run `python -m build` with what is installed here, without the network."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, *arguments]
    done = subprocess.run(
        [*command, checkout], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


def run(folder, *command, **environment):
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    keep["NVIDIA_DRIVER"] = "/none"
    streams = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return subprocess.run(command, cwd=folder, env={**keep, **environment}, **streams)


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def dirty_wheel(tmp_path_factory):
    """A wheel from a checkout in which other things were built before."""
    folder = tmp_path_factory.mktemp("dirty")
    checkout = copy_checkout(folder / "towers checkout")
    for left_over in ["towers/renamed.py", "models/cnn.py", "tests/test_cnn.py"]:
        path = checkout / "build" / "lib" / left_over
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    with build(checkout, folder / "dist", "--wheel") as wheel:
        yield wheel


def test_wheel_holds_the_package_and_nothing_else(dirty_wheel):
    assert dirty_wheel.filename.endswith(f"/towers-{towers.__version__}-py3-none-any.whl")
    files = {name for name in dirty_wheel.namelist() if ".dist-info/" not in name}
    assert files == {str(path.relative_to(ROOT)) for path in (ROOT / "towers").rglob("*.py")}


def test_metadata(dirty_wheel):
    def about(name):
        return dirty_wheel.read(f"towers-{towers.__version__}.dist-info/{name}").decode()

    command = ["[console_scripts]", "towers", "=", "towers.__main__:main"]
    assert about("entry_points.txt").split() == command
    metadata = email.message_from_string(about("METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("towers", towers.__version__)
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text("utf-8").strip()
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    of_extras = {re.sub(".*[\"'](.*)[\"']", r"\1", str(r.marker)) for r in required if r.marker}
    assert of_extras >= {"gpu", "profile", "test"}
    assert {f"{r.name}{r.specifier}" for r in required if not r.marker} == {
        "tensorflow>=2.18", "tensorboard>=2.18", "keras>=3.12", "numpy",
        "absl-py", "nvidia-ml-py", "packaging", "pillow",
    }  # fmt: skip
    assert any("tensorflow[and-cuda]>=2.18" in str(r) for r in required)


@pytest.mark.unit
def test_constraints_have_one_version_of_each_cuda_package_that_tensorflow_takes():
    lines = (ROOT / "scripts" / "cuda-constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    taken = map(Requirement, importlib.metadata.requires("tensorflow"))
    extra = {r.name: r.specifier for r in taken if r.marker and "and-cuda" in str(r.marker)}
    assert pinned.keys() == {"tensorflow", "keras", *extra}
    assert all(specifier.contains(pinned[name]) for name, specifier in extra.items())
    assert pinned["tensorflow"] == importlib.metadata.version("tensorflow")


def test_scripts_can_be_run():
    for script in [*SCRIPTS, "scripts/_venv"]:
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
        assert os.access(ROOT / script, os.X_OK) == (script in SCRIPTS)  # _venv is sourced


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose path has a space in it, and no .venv: what its scripts look at."""
    copied = copy_checkout(tmp_path / "a checkout", "setup.py pyproject.toml scripts .ci".split())
    (copied / "tests/builder").mkdir(parents=True)
    return copied


@pytest.fixture
def python(tmp_path):
    """A stand-in for Python: it writes down what it is called with, and installs nothing."""
    return executable(
        tmp_path / "bin" / "python3.12",
        f'''
case "$*" in
*version_info*) echo 3.12 ;;
"-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python
    printf '#!/bin/sh\\nprintf "%%s|" "$@"\\n' >.venv/bin/towers && chmod +x .venv/bin/towers ;;
*"-m pip"*) [ ! -e fail ] || exit 1 ;;
esac
echo "$*" >>"{tmp_path}/calls"
''',
    )


def calls(python):
    return (python.parents[1] / "calls").read_text().splitlines()


def num_installations(python):
    return sum("-m pip install" in call for call in calls(python))


def test_quickstart_refuses_a_python_that_will_not_do(checkout, tmp_path):
    for version, message in {
        "": "cannot run PYTHON; install Python 3.10 or newer",  # there is no such program
        "3.9": "PYTHON is Python 3.9, towers needs 3.10 or newer; set PYTHON to its path",
        "3.12": "PYTHON has no venv module; type: apt-get install python3.12-venv",
    }.items():
        found = tmp_path / "bin" / "python"
        if version:
            text = f'case "$*" in *version_info*) echo {version} ;; *ensurepip*) exit 1 ;; esac\n'
            executable(found, text)
        done = run(checkout, "scripts/quickstart", PYTHON=str(found))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        message = message.replace("PYTHON", str(found), 1)
        assert done.stderr.startswith(f"quickstart: {message}")
        assert not (checkout / ".venv").exists()


def test_quickstart_trains_and_installs_only_when_that_changes_something(
    checkout, python, tmp_path
):
    command = [checkout / "scripts/quickstart", "--num_towers=2", "--train_dir=a b"]
    first = run(tmp_path, *command, PYTHON=str(python))
    trained = "train|--flagfile=configs/quickstart.cfg|--num_towers=2|--train_dir=a b|"
    assert (first.returncode, first.stderr) == (0, "")
    assert "0.6 GB to download" in first.stdout and first.stdout.splitlines()[-1] == trained
    assert calls(python)[-1].endswith("-e .") and num_installations(python) == 1
    assert run(tmp_path, *command, PYTHON=str(python)).stdout.strip() == trained
    assert num_installations(python) == 1

    with (checkout / "setup.py").open("a") as file:
        file.write("# another requirement\n")
    run(checkout, "scripts/quickstart", PYTHON=str(python))
    assert num_installations(python) == 2


def test_quickstart_installs_cuda_beside_what_is_there_if_there_is_a_driver(
    checkout, python, tmp_path
):
    run(checkout, "scripts/test", "--fast", PYTHON=str(python))
    smi = executable(tmp_path / "driver/nvidia-smi", "exit 9\n")  # there is no driver
    on_path = {"PATH": f"{smi.parent}:{os.environ['PATH']}", "PYTHON": str(python)}
    run(checkout, "scripts/quickstart", **on_path)
    assert num_installations(python) == 1  # what the tests need includes what quickstart needs
    executable(smi, "echo GPU 0: NVIDIA A100\n")
    for command in "scripts/quickstart", "scripts/quickstart", "scripts/test":
        assert run(checkout, command, **on_path).returncode == 0
    installed = [call for call in calls(python) if "-m pip install" in call]
    assert len(installed) == 2 and installed[1].endswith(
        "-c scripts/cuda-constraints.txt -e .[gpu]"
    )
    smi.unlink()
    with (checkout / "scripts/cuda-constraints.txt").open("a") as file:
        file.write("# another version\n")
    (tmp_path / "version").write_text("")
    run(checkout, "scripts/quickstart", PYTHON=str(python), NVIDIA_DRIVER=f"{tmp_path}/version")
    assert num_installations(python) == 3


def test_other_systems_are_named_at_import(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.platform = sys.argv[2]; import towers"
    )
    for system in "darwin", "win32":
        done = run(tmp_path, sys.executable, "-c", program, str(ROOT), system)
        assert done.stderr.splitlines()[-1].startswith("ImportError: towers needs Linux")
        assert "WSL 2" in done.stderr
