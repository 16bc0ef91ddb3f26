"""`towers doctor`: what it says of this machine, and of machines that are made up."""

import dataclasses
import email.message
import importlib.metadata
import json

import pytest

from tests.fake_gpus import A100, FULL, H100, RTX5090, SMALL
from towers.commands.doctor import command as doctor
from towers.devices import self_test
from towers.options.run import Options

pytestmark = pytest.mark.unit


def checks(**options):
    """Return {name: check}, and the lines that are printed."""
    lines = []
    found = doctor.run(Options(**options), lines.append)
    assert lines[-1].endswith("checks" if problems(found) else "checks: all ok")
    return {check.name: check for check in found}


def problems(found):
    return [check.name for check in found if check.status == "problem"]


@pytest.fixture
def probe(monkeypatch):
    """Let the checks run in this process, and computations find {device: error} of what is set."""
    found = {}

    def run_module(name, options):
        if "end" in found:
            return found["end"]
        return [*map(dataclasses.asdict, doctor.check_devices(json.loads(options)))]

    def find_errors(names):
        return {name: found.get(name) for name in names}

    monkeypatch.setattr(self_test, "run_module", run_module)
    monkeypatch.setattr(self_test, "find_errors", find_errors)
    return found


@pytest.mark.process
def test_this_machine_has_no_problem(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    found = checks()
    assert not problems(found.values())
    assert found.keys() >= {"Python", "tensorflow", "keras", "GPUs", "computing on /cpu:0"}
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_a_driver_too_old_for_a_gpu_is_told_by_number(install, probe):
    install(A100, H100, driver="550.54.14")
    found = checks()
    assert problems(found.values()) == ["GPUs"] and "GPU 1 (NVIDIA H100)" in found["GPUs"].detail
    assert "--visible_gpus=0" in found["GPUs"].remedy
    install(A100, H100, driver="550.54.14")
    assert not problems(checks(visible_gpus="0").values())
    install(A100, RTX5090, driver="570.86.10")
    found = checks()
    assert not problems(found.values()) and "RTX 5090" in found["kernels"].detail


def test_gpus_are_those_of_the_driver_and_are_read_back(install, probe):
    machine = install(A100, A100)
    found = checks(gpu_memory_limit_mib=512)
    assert not problems(found.values()) and machine.limits_mib == [[512], [512]]
    assert "1 (NVIDIA A100), 40536 MiB free" in found["GPUs"].detail
    assert found["computing on /gpu:1"].status == "ok"
    assert "PCI bus id" in found["device"].detail and "512 MiB" in found["memory"].detail


@pytest.mark.parametrize(
    "cards, options, found, name, remedy",
    [
        ([A100], {"visible_gpus": "3"}, {}, "GPUs", "--visible_gpus=0"),
        ([A100, FULL], {}, {}, "GPUs", "--visible_gpus=0"),
        ([SMALL], {}, {}, "GPUs", "and-cuda"),
        ([A100, A100], {}, {"/gpu:1": "off"}, "computing on /gpu:1", "--visible_gpus"),
        ([A100], {}, {"end": "was ended by SIGABRT: bad ptx"}, "TensorFlow", "and-cuda"),
    ],
)
def test_a_problem_has_a_remedy(install, probe, cards, options, found, name, remedy):
    install(*cards)
    probe.update(found)
    of_machine = checks(**options)
    assert problems(of_machine.values()) == [name]
    assert remedy in f"{of_machine[name].detail} {of_machine[name].remedy}"


def test_an_installation_tells_itself_what_it_needs(monkeypatch):
    message = email.message.Message()
    message["Version"], message["Requires-Python"] = "9.9", ">=99"
    for line in ["keras<3,>=2", "no-such-package", "PIL>1", 'pytest>=99; extra == "test"']:
        message["Requires-Dist"] = line
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: message)
    found = {check.name: check for check in doctor.check_versions()}
    assert list(found) == ["towers", "Python", "keras", "no-such-package", "PIL"]
    assert problems(found.values()) == ["Python", "keras", "no-such-package"]  # pillow has a PIL
    assert found["keras"].remedy == "type python -m pip install 'keras<3,>=2'"

    def metadata(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    (check,) = doctor.check_versions()  # of a checkout that is not installed
    assert check.status == "ok" and "pip install -e" in check.remedy
