"""Made-up GPUs: a driver (NVML), and TensorFlow's GPUs, for machines that have none.

    machine = fake_gpus.install(monkeypatch, A100, A100)
    devices.configure(visible_gpus="1", allow_growth=True)
    assert machine.growth == [True]

Only functions of `pynvml` and of `tf.config` are replaced, so all of towers runs as it is. As CUDA
does, TensorFlow reads CUDA_VISIBLE_DEVICES once, when it first lists its GPUs.
"""

import dataclasses
import os
from types import SimpleNamespace

import pynvml
import tensorflow as tf

from towers import tf_internals
from towers.devices import gpus, shown_names
from towers.options.parts import GpuOptions

MIB = 2**20
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_GPU_THREAD_MODE", "NVIDIA_TF32_OVERRIDE"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU: what the driver tells of it, and whether TensorFlow takes it."""

    name: str = "NVIDIA A100"
    capability: tuple[int, int] = (8, 0)
    total_mib: int = 40960
    free_mib: int = 40536
    holders: tuple[tuple[int, str, int | None], ...] = ()  # pid, name, MiB of the processes on it
    lost: bool = False  # it has fallen off the bus
    silent: frozenset[str] = frozenset()  # names of NVML's functions that it does not support
    listed: bool = True  # by TensorFlow
    reserved_mib: int | None = None  # what the driver keeps; None: an old one, which does not tell
    mig: bool = False  # whether MIG splits it


A100 = Card()
FULL = Card(free_mib=1000, holders=((17, "python", 39000), (18, "blender", None)))
SMALL = Card("NVIDIA T400", (7, 5), total_mib=2048, free_mib=2000, listed=False)
LOST = Card(lost=True, listed=False)
H100 = Card("NVIDIA H100", (9, 0))  # for which TensorFlow's wheel has only PTX
RTX5090 = Card("NVIDIA GeForce RTX 5090", (12, 0))
SPLIT = Card(mig=True)


class Machine:
    """TensorFlow's GPUs, and what has been set of them."""

    def __init__(self, cards):
        self.cards = cards
        self.started = False
        self.hidden = []  # places of those that tf.config.set_visible_devices leaves out
        self.soft_placement = True
        self.memory = {}  # bytes that TensorFlow takes in place of what was set
        self._shown = self._devices = None
        self._growth, self._parts = {}, {}

    @property
    def growth(self):
        """What was set for each of TensorFlow's GPUs."""
        return [self._growth.get(gpu) for gpu in self.physical()]

    @property
    def limits_mib(self):
        """The limit of each logical device that each GPU was split into, None if it was not."""
        parts = [self._parts.get(gpu) for gpu in self.physical()]
        return [p and [part.memory_limit for part in p] for p in parts]

    def split(self, gpu, *limits_mib):
        """Split one of TensorFlow's GPUs, as a user's program may."""
        self._parts[self.physical()[gpu]] = [
            tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits_mib
        ]

    def physical(self, kind="GPU"):
        if self._devices is None:
            value = os.environ.get("CUDA_VISIBLE_DEVICES")
            shown = list(self.cards)
            if value is not None:  # what is wrong is left out: CUDA's rules are tested elsewhere
                numbers = [int(n) for n in value.split(",") if n.isdecimal()]
                numbers = [n for n in numbers if n < len(self.cards)]
                shown = [self.cards[n] for n in numbers]
            self._shown = [card for card in shown if card.listed]
            names = [f"/physical_device:GPU:{i}" for i in range(len(self._shown))]
            self._devices = [tf.config.PhysicalDevice(name, "GPU") for name in names]
        return list(self._devices)

    # What stands in for functions of TensorFlow.

    def visible(self, kind="GPU"):
        return [gpu for i, gpu in enumerate(self.physical()) if i not in self.hidden]

    def set_visible(self, chosen, kind):
        assert not self.started
        self.hidden = [i for i, gpu in enumerate(self.physical()) if gpu not in chosen]

    def details(self, gpu):
        card = self._shown[self.physical().index(gpu)]
        return {"device_name": card.name, "compute_capability": card.capability}

    def get_parts(self, gpu):
        return self._parts.get(gpu)

    def set_parts(self, gpu, parts):
        assert not self.started
        self._parts[gpu] = parts

    def set_growth(self, gpu, value):
        assert not self.started
        if self._parts.get(gpu):
            raise ValueError("Cannot set memory growth on device when virtual devices configured")
        self._growth[gpu] = value

    def device_memory_bytes(self):
        self.started = True
        result = {"/cpu:0": 256 * MIB}
        for gpu in self.visible():
            card = self._shown[self.physical().index(gpu)]
            for part in self._parts.get(gpu) or [None]:
                limit = part.memory_limit if part else card.free_mib - 500
                result[f"/gpu:{len(result) - 1}"] = limit * MIB
        return result | self.memory


def install(monkeypatch, *cards, driver=True):
    """Let this process have `cards`, fresh: nothing listed, nothing set; return the `Machine`.

    `driver` is whether there is one, or its version.
    """
    machine = Machine(cards)
    install_driver(monkeypatch, *cards, there=driver)
    monkeypatch.setattr(gpus, "_in_force", GpuOptions())
    monkeypatch.setattr(shown_names, "_shown", {})
    monkeypatch.setattr(shown_names, "in_use", False)
    monkeypatch.setattr(tf_internals, "has_listed_devices", lambda: machine._devices is not None)
    monkeypatch.setattr(tf_internals, "has_started", lambda: machine.started)
    monkeypatch.setattr(tf_internals, "device_memory_bytes", machine.device_memory_bytes)
    config = tf.config

    def answer(owner, name, made_up, is_of_gpus):
        real = getattr(owner, name)
        function = lambda *given: (made_up if is_of_gpus(*given) else real)(*given)  # noqa: E731
        monkeypatch.setattr(owner, name, function)

    answer(config, "list_physical_devices", machine.physical, lambda kind=None: kind == "GPU")
    answer(config, "get_visible_devices", machine.visible, lambda kind=None: kind == "GPU")
    answer(config, "set_visible_devices", machine.set_visible, lambda _, kind=None: kind == "GPU")
    for owner, name, made_up in (
        (config, "get_logical_device_configuration", machine.get_parts),
        (config, "set_logical_device_configuration", machine.set_parts),
        (config.experimental, "get_memory_growth", lambda gpu: machine._growth.get(gpu)),
        (config.experimental, "set_memory_growth", machine.set_growth),
        (config.experimental, "get_device_details", machine.details),
    ):
        answer(owner, name, made_up, lambda device, *_: device.device_type == "GPU")
    monkeypatch.setattr(
        config, "set_soft_device_placement", lambda on: setattr(machine, "soft_placement", on)
    )
    monkeypatch.setattr(config, "get_soft_device_placement", lambda: machine.soft_placement)
    return machine


def install_driver(monkeypatch, *cards, there=True):
    """Let NVML have `cards`, or let it not be there."""
    for name in VARIABLES:  # set first: only then is it put back at the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def init():
        if not there:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def handle(index):
        if cards[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(index=index, card=cards[index])

    def memory(index, card, version=None):
        if version and card.reserved_mib is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        reserved = (card.reserved_mib or 0) * MIB
        total, free = card.total_mib * MIB, card.free_mib * MIB
        return SimpleNamespace(total=total, free=free, reserved=reserved)

    def process_name(pid):
        names = {holder: name for card in cards for holder, name, _ in card.holders}
        if not names.get(pid):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return names[pid]

    def of_card(name, answer):
        def function(handle, *what):
            if name in handle.card.silent:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer(handle.index, handle.card, *what)

        return function

    def processes(index, card):
        found = [(pid, used and used * MIB) for pid, _, used in card.holders]
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

    functions = {
        "nvmlInit": init,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlSystemGetDriverVersion": lambda: "555.42.02" if there is True else there,
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlSystemGetProcessName": process_name,
    }
    answers = {
        "nvmlDeviceGetName": lambda i, card: card.name,
        "nvmlDeviceGetUUID": lambda i, card: uuid(i),
        "nvmlDeviceGetPciInfo": lambda i, card: SimpleNamespace(busId=bus_id(i)),
        "nvmlDeviceGetCudaComputeCapability": lambda i, card: list(card.capability),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": lambda i, card: [int(card.mig)] * 2,
        "nvmlDeviceGetComputeRunningProcesses": processes,
    }
    functions |= {name: of_card(name, answer) for name, answer in answers.items()}

    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)


def uuid(index):
    return f"GPU-{index}a5b0c3d-0000-4000-8000-000000000000"


def bus_id(index):
    return f"00000000:{index + 1}5:00.0"
