"""What `--workers` may say, what schedulers say of it, and how a lock file is understood."""

import dataclasses
import json
import os
import sys
import types

import pytest

from towers.errors import InputError
from towers.workers.addresses import find_workers, join_address, parse_address
from towers.workers.lock import Lock, LockFile, from_text, to_text

pytestmark = pytest.mark.unit


def slurm(nodes, tasks):
    return {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }


def tf_config(**cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}


class Pods:
    """Stands in for a client of Kubernetes: two pods that run, and one that waits."""

    def list_pod_for_all_namespaces(self, label_selector):
        phases = ["Running", "Running", "Pending"][: 3 if label_selector.endswith("late") else 2]
        names = [types.SimpleNamespace(name=f"{label_selector}-{i}") for i in range(3)]
        status = [
            types.SimpleNamespace(phase=p, host_ip=f"10.0.0.{i}") for i, p in enumerate(phases)
        ]
        pairs = zip(names, status, strict=False)
        items = [types.SimpleNamespace(metadata=n, status=s) for n, s in pairs]
        return types.SimpleNamespace(items=items)


@pytest.fixture
def scheduler(monkeypatch):
    """Return a function that sets the variables of a scheduler."""
    kubernetes = types.ModuleType("kubernetes")
    kubernetes.client = types.SimpleNamespace(CoreV1Api=Pods)
    kubernetes.config = types.SimpleNamespace(load_incluster_config=lambda: None)
    monkeypatch.setitem(sys.modules, "kubernetes", kubernetes)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)

    def set_up(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_up


@pytest.mark.parametrize(
    "text, environ, found",
    [
        ("host1", {}, ["host1:2222"]),
        ("Host1:22, 10.0.0.5", {}, ["host1:22", "10.0.0.5:2222"]),
        ("[fd00::5]:22,[::1]", {}, ["[fd00::5]:22", "[::1]:2222"]),
        ("slurm", slurm("gpu5", [1]), ["gpu5:2222"]),
        ("slurm:99", slurm("n[01-02],m", [1, 1, 2]), ["m:99", "m:100", "n01:99", "n02:99"]),
        ("kubernetes:99", {"JOB_NAME": "mine"}, ["10.0.0.0:99", "10.0.0.1:99"]),
        ("TF_CONFIG", tf_config(worker=["a:1", "b:2"], chief=["c:3"]), ["a:1", "b:2"]),
    ],
)
def test_workers_are_found(scheduler, text, environ, found):
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    scheduler(environ)
    assert find_workers(text) == found
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


NO_ADDRESS, REMEDY = "type HOST:PORT", "--workers=host1:2222,host2:2222"


@pytest.mark.parametrize(
    "text, environ, why",
    [
        *((text, {}, NO_ADDRESS) for text in ("", "a,,b", "a:1:2", "http://a", "a:65536", "a b")),
        ("a:0", {}, "has no port"),
        ("slurm:x", slurm("a", [1]), REMEDY),
        ("slurm", {}, REMEDY),
        ("slurm", slurm("n[1-", [1]), REMEDY),
        ("kubernetes", {"JOB_NAME": "late"}, REMEDY),
        ("TF_CONFIG", {}, REMEDY),
        ("TF_CONFIG", {"TF_CONFIG": "{"}, REMEDY),
    ],
)
def test_what_names_no_workers_is_one_line(scheduler, text, environ, why):
    scheduler(environ)
    with pytest.raises(InputError, match=why) as error:
        find_workers(text)
    assert str(error.value).startswith("--workers=") and "\n" not in str(error.value)


def test_the_package_that_kubernetes_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(InputError, match="pip install kubernetes"):
        find_workers("kubernetes")


def test_an_address_is_taken_apart_and_joined():
    for text in ("a:1", "10.0.0.5:2222", "[fd00::5]:0"):
        assert join_address(*parse_address(text, "address")) == text


def test_the_first_program_has_the_worker_until_it_is_silent_or_releases_it(tmp_path):
    now, path = 0.0, tmp_path / "lock"
    first, second = (Lock(id, f"{id}'s program", 10.0) for id in ("anna", "bert"))
    file = LockFile(tmp_path, clock=lambda: now)
    assert file.look() == "" and file.owner is None
    for beat in range(3):
        path.write_text(to_text(dataclasses.replace(first, beat=beat)))
        assert file.look() == "" and file.owner.id == "anna"
        path.write_text(to_text(second))  # it looked at the same moment
        assert file.look() == "" and from_text(Lock, path.read_text()).id == "anna"
        now += 9
        path.write_text("{half a li")
        assert file.look() == "" and file.owner.id == "anna"
        now += 9
    now += 2
    assert "no heartbeat" in file.look()
    file = LockFile(tmp_path, clock=lambda: now)
    path.write_text(to_text(second))
    assert file.look() == ""
    path.write_text(to_text(dataclasses.replace(second, timeout_seconds=0.0)))
    assert "released" in file.look()


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"id": 1, "owner": "a"}', "\udcff"])
def test_what_is_no_lock_is_none(text):
    assert from_text(Lock, text.encode(errors="surrogateescape")) is None
