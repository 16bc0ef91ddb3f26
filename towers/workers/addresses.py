"""Addresses of workers: those that `--workers` names, or those that a scheduler has started.

find_workers("node1:2222,node2")  ->  ["node1:2222", "node2:2222"]
find_workers("slurm")                 the tasks of this Slurm step
find_workers("kubernetes")            the pods with the label job-name=$JOB_NAME
find_workers("TF_CONFIG")             the workers of TensorFlow's own variable
"""

import os
import re
from typing import Any

from towers.errors import InputError, first_line

PORT = 2222  # TensorFlow's usual one


def find_workers(text: str) -> list[str]:
    """Return the "host:port" addresses of a value of `--workers`.

    Args:
        text: addresses separated by commas; or slurm, kubernetes or TF_CONFIG, the first two
            perhaps with a port, as slurm:4000.

    Raises:
        InputError: an address is malformed, or the scheduler does not say any.
    """
    source, _, port = text.partition(":")
    if source in ("slurm", "kubernetes", "TF_CONFIG"):
        try:
            found = _resolver(source, int(port or PORT)).cluster_spec().job_tasks("worker")
        except Exception as error:  # resolvers raise many classes
            raise InputError(
                f"--workers={text}: {first_line(error)}; or name the workers yourself: "
                "--workers=host1:2222,host2:2222"
            ) from None
    else:
        found = text.split(",")
    addresses: list[str] = []
    for part in found:
        host, number = parse_address(part.strip(), "workers")
        if number == 0:
            raise InputError(f"--workers={text}: {part} has no port; each worker prints its port")
        addresses.append(join_address(host.lower(), number))
    return addresses


def _resolver(source: str, port: int) -> Any:
    """Return TensorFlow's cluster resolver of a scheduler."""
    import tensorflow as tf

    resolvers = tf.distribute.cluster_resolver
    if source == "slurm":
        # Each worker has its own GPU flags; here the number has to be at least that of a node's
        # tasks.
        gpus = dict(gpus_per_node=1024, gpus_per_task=1, auto_set_gpu=False)
        return resolvers.SlurmClusterResolver(port_base=port, **gpus)
    if source == "TF_CONFIG":
        return resolvers.TFConfigClusterResolver()
    try:
        from kubernetes import client, config
    except ImportError:
        raise InputError("the package kubernetes is missing: type pip install kubernetes") from None
    config.load_incluster_config()
    label = f"job-name={os.environ.get('JOB_NAME', 'tensorflow')}"
    # Without a client of ours it would look for a kubeconfig file, which pods do not have.
    client = client.CoreV1Api()
    return resolvers.KubernetesClusterResolver({"worker": [label]}, port, override_client=client)


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Return (host, port) of "node7:2222", "10.0.0.5" or "[fd00::5]:2222".

    Args:
        text: the address; without a port it is 2222.
        flag: name with which the message of an error begins.

    Raises:
        InputError: the address is malformed.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+))(?::(\d{1,5}))?", text, re.ASCII)
    port = int(match[3] or PORT) if match else -1
    if not 0 <= port <= 65535:
        raise InputError(
            f"--{flag}={text}: type HOST:PORT, such as --{flag}=10.0.0.5:{PORT}; IPv6 in brackets"
        )
    return match[1] or match[2], port


def join_address(host: str, port: int) -> str:
    """Return "host:port", with the brackets of IPv6, see `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
