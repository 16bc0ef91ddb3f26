"""Set, then read back: what a process sees and takes of GPUs, on made-up machines."""

import contextlib
import functools
import os
from dataclasses import replace

import pytest
import tensorflow as tf

from tests import runs
from tests.fake_gpus import A100, FULL, H100, RTX5090, SMALL, Card
from tests.programs import python
from towers.devices import (
    config_proto,
    describe,
    gpus,
    loose_ops_on,
    self_test,
    shown_names,
    tower_devices,
)
from towers.errors import RunError
from towers.options.run import Options

pytestmark = pytest.mark.unit

LIMITED = Card(total_mib=10000, free_mib=9900)
SILENT = Card(silent=frozenset(["nvmlDeviceGetMemoryInfo"]))
SHARED = Card(total_mib=10000, free_mib=4000, holders=((17, "python", 6000),))
HALF = {"per_process_gpu_memory_fraction": 0.5}
ALL = {"per_process_gpu_memory_fraction": 1}
THREADS = "threads     TF_GPU_THREAD_MODE=gpu_private"
TF32_ON = "precision   TF32 is on: float32 products use 10 of 23 bits; --tf32=false uses all"
TF32_OFF = "precision   TF32 is off"
NO_GPU = "memory      no GPU found: --{} has no effect"


def memory(*mib):
    """Return the lines of GPUs with so much memory."""
    return [f"memory      /gpu:{i} {n} MiB, growth off" for i, n in enumerate(mib)]


refusal = functools.partial(runs.refusal, gpus.configure)


def started(machine):
    """Return a machine on which TensorFlow has listed its devices, and started."""
    machine.physical()
    machine.started = True
    return machine


@pytest.mark.parametrize(
    "cards, options, limits, lines",
    [
        ([A100, SMALL], {}, [None], [*memory(40036), TF32_ON]),
        ([LIMITED, Card(total_mib=501, free_mib=500), A100], HALF, [[5000], [250], [20480]],
         [*memory(5000, 250, 20480), THREADS, TF32_ON]),
        # What the driver keeps to itself is not CUDA's.
        ([replace(A100, reserved_mib=424)], ALL, [[40536]], [*memory(40536), TF32_ON]),
        ([SILENT], {"gpu_memory_limit_mib": 4096}, [[4096]], [*memory(4096), TF32_ON]),
        ([A100, FULL, A100], {"visible_gpus": "0,2"}, [None, None],
         [*memory(40036, 40036), THREADS, TF32_ON]),
        ([A100], {"visible_gpus": "none", "allow_growth": True}, [],
         [NO_GPU.format("allow_growth=True")]),
        ([], HALF, [], [NO_GPU.format("per_process_gpu_memory_fraction=0.5")]),
    ],
)  # fmt: skip
def test_what_is_set_is_read_back(install, cards, options, limits, lines):
    machine = install(*cards, driver=bool(cards))
    gpus.configure(**options)
    shown = {None: None, "none": "-1", "0,2": "0,2"}[options.get("visible_gpus")]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert machine.limits_mib == limits and machine.growth == [None] * len(limits)
    assert os.environ.get("TF_GPU_THREAD_MODE") == ("gpu_private" if len(limits) > 1 else None)
    listed = gpus.driver_gpus(tf.config.list_physical_devices("GPU"))
    assert [gpu.index for gpu in listed] == ([0, 2] if shown == "0,2" else [*range(len(limits))])
    assert not machine.started
    assert gpus.read_back() == lines


@pytest.mark.parametrize(
    "cards, options, says, remedy",
    [
        ([A100, SMALL, A100], {"visible_gpus": "1,2"}, "GPU 1 (NVIDIA T400)", "and-cuda"),
        ([], {"visible_gpus": "0"}, "--visible_gpus=0", "towers doctor"),
        ([A100, A100], {"devices": "/gpu:1,gpu:2"}, "no /gpu:2; TensorFlow sees /gpu:0, /gpu:1;",
         "towers doctor"),
        ([], {"devices": "/gpu:1"}, "no /gpu:1; TensorFlow sees no GPU;", "towers doctor"),
        ([A100, LIMITED], {"gpu_memory_limit_mib": 10001}, "GPU 1 (NVIDIA A100)", "ask for less"),
        ([A100, SILENT], HALF, "memory_fraction=0.5", "--gpu_memory_limit_mib=4096"),
        ([SHARED, A100], HALF, "python (pid 17, 6000 MiB)", "--visible_gpus=1"),
        ([A100, FULL, A100, FULL], {}, "GPU 1 (NVIDIA A100) has 1000 of 40960 MiB free: python "
         "(pid 17, 39000 MiB), blender (pid 18) uses the rest", "--visible_gpus=0,2"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_and_nothing_is_set_by_halves(
    install, cards, options, says, remedy
):
    machine = install(*cards, driver=bool(cards))
    message = refusal(**options)
    assert says in message and remedy in message
    assert set(machine.limits_mib) <= {None}


OLD_H100, OLD_5090 = ("GPU 0 (NVIDIA H100)", "9.0", "555"), ("(NVIDIA GeForce RTX 5090)", "570")


@pytest.mark.parametrize(
    "driver, cards, options, says, others",
    [
        ("535.104.05", [H100, A100, H100], {}, OLD_H100, "1"),
        ("560.35", [A100, RTX5090], {"visible_gpus": "1"}, (*OLD_5090, "GPU 1"), "0"),
        ("555.42.02", [H100, A100], {}, (), ""),
        ("570.86.10", [RTX5090, H100], {}, (), ""),
        ("550.54.14", [A100, H100], {"visible_gpus": "0"}, (), ""),
    ],
)  # fmt: skip
def test_a_driver_compiles_for_gpus_that_are_newer_than_tensorflow(
    install, driver, cards, options, says, others
):
    install(*cards, driver=driver)
    if says:
        message = refusal(**options)
        assert message.endswith(f"--visible_gpus={others}") and driver in message
        assert all(word in message for word in says)
    else:
        gpus.configure(**options)


def test_kernels_that_are_compiled_first_are_told_and_waited_for(install, monkeypatch, capsys):
    """An RTX 5090's take minutes at the first start, an H100's less than a second."""
    waited = []

    def run(*arguments, timeout, **kwargs):
        told = capsys.readouterr().err
        waited.append((timeout, told.count("\n"), "compiles" in told))
        raise self_test.subprocess.TimeoutExpired("python", timeout, stderr=b"")

    monkeypatch.setattr(self_test.subprocess, "run", run)
    for cards in [A100], [H100], [A100, RTX5090]:
        install(*cards, driver="570.86.10")
        with pytest.raises(RunError, match="did not answer"):
            gpus.try_out()
    assert waited == [(180, 0, False), (180, 0, False), (1800, 1, True)]


@pytest.mark.parametrize(
    "devices, hidden, names",
    [
        ("/gpu:1", [0, 2], ["/gpu:1"]),
        ("device:gpu:2, /gpu:00", [1], ["/gpu:2", "/gpu:0"]),
        ("/cpu:0,/cpu:1", [0, 1, 2], ["/cpu:0", "/cpu:1"]),
        ("cpu", [0, 1, 2], ["/cpu:0"]),
        *((kind, [], ["/gpu:0", "/gpu:1", "/gpu:2"]) for kind in ("", "gpu", "any")),
    ],
)
def test_gpus_that_no_tower_stands_on_are_hidden_and_the_others_keep_their_names(
    install, devices, hidden, names
):
    machine = install(LIMITED, LIMITED, LIMITED)
    gpus.configure(devices=devices, gpu_memory_limit_mib=512)
    assert machine.hidden == hidden and not machine.started
    of_tensorflow = tower_devices(devices=devices)
    visible = [i for i in range(3) if i not in hidden]
    assert of_tensorflow == [
        f"/gpu:{visible.index(int(name[5:]))}" if "gpu" in name else name for name in names
    ]
    assert tower_devices(devices=of_tensorflow) == tower_devices(devices=devices) == of_tensorflow
    rows = describe(of_tensorflow)
    assert [row.device for row in rows] == names
    numbers = [int(name[5:]) for name in names if "gpu" in name]
    assert [row.driver_index for row in rows if "gpu" in row.device] == numbers
    assert list(map(shown_names.short_device_name, of_tensorflow)) == names
    lines = [line.split()[1] for line in gpus.read_back() if line.startswith("memory      /gpu")]
    assert lines == [f"/gpu:{i}" for i in visible]


def test_a_full_gpu_that_no_tower_stands_on_is_no_error(install):
    install(FULL, A100)
    gpus.configure(devices="/gpu:1")
    message = runs.refusal(tower_devices, devices="/gpu:0")
    assert "no /gpu:0; TensorFlow sees /gpu:1," in message
    assert "towers.devices.configure(devices=" in message
    assert "sees 1 GPU (/gpu:1)" in runs.refusal(tower_devices, 2)
    gpus.read_back()
    gpus.configure(devices="/gpu:1")  # the same again
    started(install(A100, A100))
    assert "devices='/gpu:1' comes too late" in refusal(devices="/gpu:1")
    gpus.configure_run(Options(devices="/gpu:1"))


def test_what_the_program_has_split_is_kept_or_excludes_an_option(install):
    machine = install(LIMITED)
    machine.split(0, 256, 512)
    for options in {"allow_growth": True}, {"gpu_memory_limit_mib": 128}, HALF:
        message = refusal(**options)
        assert message.startswith(f"--{next(iter(options))}=") and "GPU 0 into" in message
        assert "256, 512 MiB" in message and "set_logical_device_configuration" in message
    gpus.configure()
    assert machine.limits_mib == [[256, 512]] and machine.growth == [None]
    assert gpus.read_back()[:2] == memory(256, 512)


def test_growth_of_the_program_is_kept(install):
    machine = install(LIMITED, LIMITED)
    machine.set_growth(machine.physical()[1], True)
    gpus.configure(devices="/gpu:1")
    assert gpus.read_back()[0].endswith("growth on")


@pytest.mark.parametrize("value, growth", [("true", "on"), ("false", "off")])
def test_the_environment_may_force_growth(install, monkeypatch, value, growth):
    install(LIMITED)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", value)
    gpus.configure()
    assert gpus.read_back()[0].endswith(f"MiB, growth {growth}")
    install(LIMITED)
    gpus.configure(allow_growth=True)
    refused = pytest.raises(RunError, match="TF_FORCE_GPU_ALLOW_GROWTH=false")
    with refused if value == "false" else contextlib.nullcontext():
        assert gpus.read_back()[0].endswith("MiB, growth on")


@pytest.mark.parametrize("options", [{}, {"gpu_memory_limit_mib": 512}])
def test_an_allocator_without_limits_is_told(install, monkeypatch, options):
    install(LIMITED)
    monkeypatch.setenv("TF_GPU_ALLOCATOR", "cuda_malloc_async")
    gpus.configure(**options)
    line = gpus.read_back()[0]
    assert "/gpu:0 has no limit with TF_GPU_ALLOCATOR=cuda_malloc_async" in line
    assert line.endswith(": unset it for a limit of 512 MiB") == bool(options)


def test_loose_ops_go_to_the_first_tower_and_not_to_the_first_gpu(install):
    """Where TensorFlow has started with other GPUs, too, which are perhaps not all."""
    for hidden, devices, expected in (
        ("", "/gpu:2,gpu:1", "GPU:2"), ("", "/gpu:1,/gpu:0", ""), ("", "cpu", "CPU:0"),
        ("", "", ""), ("/gpu:0,/gpu:1", "/gpu:1", "GPU:1"), ("/gpu:1,/gpu:2", "/gpu:2", "GPU:1"),
        ("/gpu:1,/gpu:2", "/gpu:1", ""),
    ):  # fmt: skip
        machine = install(A100, A100, A100)
        gpus.configure(devices=hidden)
        machine.started = True
        with tf.Graph().as_default(), loose_ops_on(devices):
            assert tf.zeros([]).device.endswith(expected), (hidden, devices)
            assert bool(tf.zeros([]).device) == bool(expected)


def test_gpus_cannot_be_hidden_once_they_are_listed(install):
    machine = install(A100, A100)
    machine.physical()
    for asked in "1", "none":
        assert "comes too late, TensorFlow has already listed its devices" in refusal(
            visible_gpus=asked
        )
    gpus.configure(allow_growth=True)  # but this is in time
    assert machine.growth == [True, True]


def test_options_that_come_too_late(install):
    machine = started(install(A100))
    message = refusal(gpu_memory_limit_mib=512)
    assert message.startswith("--gpu_memory_limit_mib=512 comes too late")
    assert "towers.devices.configure() before" in message and machine.limits_mib == [None]
    started(install())
    gpus.configure(allow_growth=True)  # there is nothing to limit
    gpus.configure(visible_gpus="none")  # nor to hide
    assert "comes too late" in refusal(visible_gpus="0")


def test_the_same_again_is_fine_at_any_time_and_what_came_first_is_kept(install):
    machine = install(A100, A100)
    for _ in range(2):
        gpus.configure(visible_gpus="1", gpu_memory_limit_mib=512)
    gpus.read_back()
    assert machine.started
    gpus.configure()
    gpus.configure(visible_gpus="1")
    assert gpus.read_back() == [*memory(512), TF32_ON]
    assert "comes too late" in refusal(gpu_memory_limit_mib=513)


@pytest.fixture
def tf32():
    enable = tf.config.experimental.enable_tensor_float_32_execution
    yield enable
    enable(True)


def test_tf32_is_told_and_switched(install, tf32, monkeypatch):
    install(A100)
    gpus.configure(tf32=False)
    assert not tf.config.experimental.tensor_float_32_execution_enabled()
    assert gpus.precision() == [TF32_OFF]
    gpus.configure()
    assert gpus.precision() == [TF32_ON]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert gpus.precision() == [TF32_OFF]
    for cards in [replace(SMALL, listed=True)], []:  # of 7.5; none
        install(*cards)
        assert gpus.precision() == []


PROGRAM = """
import tensorflow as tf
from towers import devices, tf_internals

assert not tf_internals.has_listed_devices(), "importing lists devices"
devices.configure(gpu_memory_limit_mib=512)
devices.describe()
assert devices.most_towers() == devices.most_towers("any") == devices.most_towers("cpu") == None
assert tf_internals.has_listed_devices() and not tf_internals.has_started(), "this starts nothing"
print(devices.tower_devices(2))
for options in dict(gpu_memory_limit_mib=600), dict(visible_gpus="1"):
    try:
        devices.configure(**options)
    except ValueError as error:
        print(str(error).split(";")[0])
print(devices.report(["/cpu:1"])[-1])
"""


@pytest.mark.process
def test_a_program_with_the_real_tensorflow():
    done = python("-c", PROGRAM, variables={"CUDA_VISIBLE_DEVICES": '"0,1"'})
    assert done.stdout.splitlines() == [
        "['/cpu:0', '/cpu:1']",
        "--visible_gpus=1 comes too late, TensorFlow has already listed its devices",
        NO_GPU.format("gpu_memory_limit_mib=600"),
    ], done.stderr


def test_each_gpu_is_tried_out_before_it_is_used(install, monkeypatch):
    asked, found = [], {"errors": {"/gpu:0": None, "/gpu:2": None}}
    monkeypatch.setattr(gpus.self_test, "run_probe", lambda devices: asked.append(devices) or found)
    install()
    gpus.try_out()  # there is none
    machine = install(A100, A100, A100)
    machine.hidden = [1]
    gpus.try_out()
    assert asked == [["/gpu:0", "/gpu:2"]]
    found["errors"]["/gpu:2"] = "off by 0.3"
    with pytest.raises(RunError, match="^/gpu:2: off by 0.3; leave it out with --visible_gpus"):
        gpus.try_out()
    found = "was ended by SIGABRT: bad ptx"
    with pytest.raises(RunError, match="was ended by SIGABRT: bad ptx; type towers doctor$"):
        gpus.try_out()
    machine.started = True
    gpus.try_out()  # its memory is this process' by now


def test_a_config_proto_has_the_options(install, monkeypatch):
    def limits(**options):
        virtual = config_proto(**options).gpu_options.experimental.virtual_devices
        return [list(gpu.memory_limit_mb) for gpu in virtual]

    def shown(**options):
        return config_proto(**options).gpu_options.visible_device_list

    install(*[A100] * 4)
    config = config_proto()
    assert config.allow_soft_placement and dict(config.device_count) == {"CPU": 1}
    assert limits() == [] and shown() == ""
    assert dict(config_proto(visible_gpus="none").device_count) == {"CPU": 1, "GPU": 0}
    assert limits(gpu_memory_limit_mib=512, visible_gpus="1,3") == [[512]] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", '"3,2,0"')  # places are among those
    assert shown(visible_gpus="0,2") == "2,1" and os.environ["CUDA_VISIBLE_DEVICES"] == "3,2,0"
    assert "choose from --visible_gpus=3,2,0" in runs.refusal(config_proto, visible_gpus="1")


def test_gpus_are_left_alone_where_towers_are_to_be_on_cpus(install):
    machine = install(A100, A100)
    assert tower_devices(1, [" CPU "]) == ["/cpu:0"]
    assert machine.visible() == []
    machine = started(install(A100))  # too late: it has them
    assert tower_devices(1, "cpu") == ["/cpu:0"]
    assert len(machine.visible()) == 1
