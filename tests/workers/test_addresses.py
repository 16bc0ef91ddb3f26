"""What `--workers` may say, and what schedulers say of it."""

import json

import pytest

from towers.errors import InputError
from towers.workers.addresses import check_distinct, find_workers, join_address, parse_address

pytestmark = pytest.mark.unit


def slurm(nodes):
    return {"SLURM_JOB_NODELIST": nodes}


KUBERNETES = {"JOB_NAME": "mine", "JOB_COMPLETIONS": "2", "JOB_SERVICE": "workers"}


def tf_config(**cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})}


@pytest.mark.parametrize(
    "text, environ, found",
    [
        ("host1", {}, ["host1:2222"]),
        ("Host1:22, 10.0.0.5", {}, ["host1:22", "10.0.0.5:2222"]),
        ("[fd00::5]:22,[::1]", {}, ["[fd00::5]:22", "[::1]:2222"]),
        ("slurm", slurm("gpu5"), ["gpu5:2222"]),
        ("slurm:99", slurm("n[01-03,07],a-b.c"), [f"n{i}:99" for i in ("01", "02", "03", "07")]
         + ["a-b.c:99"]),
        ("slurm", slurm("r[1-2]n[08-10]x"), [f"r{r}n{n}x:2222" for r in (1, 2)
         for n in ("08", "09", "10")]),
        ("kubernetes", KUBERNETES, ["mine-0.workers:2222", "mine-1.workers:2222"]),
        ("TF_CONFIG", tf_config(worker=["a:1", "b:2"], chief=["c:3"]), ["a:1", "b:2"]),
    ],
)  # fmt: skip
def test_workers_are_found(text, environ, found):
    assert find_workers(text, environ) == found


NO_ADDRESS, NO_NODES = "HOST:PORT is needed", "no list of nodes"
NO_CLUSTER = "TF_CONFIG has no"


@pytest.mark.parametrize(
    "text, environ, why",
    [
        ("a:1,b,a:1", {}, "a:1 is named twice"),
        ("a,A:2222", {}, "a:2222 is named twice"),
        ("a,,b", {}, "an address is empty"),
        ("", {}, "an address is empty"),
        *((text, {}, NO_ADDRESS) for text in ("a:1:2", "http://a", "a:65536", "a b")),
        ("a:0", {}, "has no port"),
        ("slurm:x", slurm("a"), NO_ADDRESS),
        ("slurm", {}, "SLURM_JOB_NODELIST is not in the environment"),
        *(("slurm", slurm(nodes), NO_NODES) for nodes in ("n[1-", "n[3-1]", "a b")),
        *(("slurm", slurm(f"n[{n}]"), NO_NODES) for n in ("1-99999999999", "0-60000]m[0-60000")),
        ("slurm", slurm("a,a"), "named twice"),
        ("kubernetes", {"JOB_NAME": "mine"}, "JOB_COMPLETIONS is not in the environment"),
        ("kubernetes", KUBERNETES | {"JOB_COMPLETIONS": "0"}, "no number of pods"),
        ("TF_CONFIG", {}, "TF_CONFIG is not in the environment"),
        ("TF_CONFIG", {"TF_CONFIG": "{"}, NO_CLUSTER),
        *(("TF_CONFIG", tf_config(worker=workers), NO_CLUSTER) for workers in ([], {"0": "a:1"})),
        ("TF_CONFIG", tf_config(worker=[1]), "an address is empty"),
    ],
)
def test_what_names_no_workers_is_one_line(text, environ, why):
    with pytest.raises(InputError, match=why) as error:
        find_workers(text, environ)
    assert str(error.value).startswith("--workers=") and "\n" not in str(error.value)


def test_an_address_is_taken_apart_and_joined():
    for text in ("a:1", "10.0.0.5:2222", "[fd00::5]:0"):
        assert join_address(*parse_address(text, "address")) == text


def test_two_names_of_one_worker_are_refused_and_other_ports_and_unknown_hosts_are_others():
    for other in "127.0.0.1", "127.0.0.2":
        with pytest.raises(InputError, match=r"localhost:2223 and .*:2223 are the same worker"):
            check_distinct(["10.0.0.5:2223", "localhost:2223", f"{other}:2223"])
    check_distinct(["localhost:1", "127.0.0.1:2", "nowhere.invalid:1", "nobody.invalid:1"])
