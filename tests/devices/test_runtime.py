"""Which line of a program started TensorFlow, as it is said to who configures it too late.

Programs run in a process of their own, where TensorFlow has not started.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU = f"CPU, {os.cpu_count()} cores shared by all its devices"


def run(path, program, **environment):
    """Run a program that lies at `path`; return what it prints."""
    path.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_late_calls_name_the_line_that_was_too_early(tmp_path):
    program = tmp_path / "program.py"
    lines = run(
        program,
        f"""
        import os
        from tensorflow.python.eager import context
        runtime = type(context.context())
        methods = runtime.ensure_initialized, runtime._initialize_physical_devices

        import tensorflow as tf
        from towers import devices
        from towers.errors import InputError

        def try_to(**options):
            try:
                devices.configure(**options)
            except InputError as error:
                print(error)

        assert context.context()._physical_devices is None, "importing lists devices"
        name = "{ROOT}/towers_of_mine.py"  # beside the package, not in it
        exec(compile("\\n\\ntf.config.list_physical_devices()", name, "exec"), {{"tf": tf}})
        try_to(visible_gpus="0")
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        devices.configure(gpu_memory_limit_mib=512)
        devices.configure(gpu_memory_limit_mib=512)
        devices.describe()
        assert not context.context()._initialized, "configure and describe start nothing"
        x = tf.zeros([2])
        devices.configure(gpu_memory_limit_mib=512, allow_soft_placement=False)
        try_to(gpu_memory_limit_mib=600)
        print(*devices.read_back(), sep="\\n")
        now = runtime.ensure_initialized, runtime._initialize_physical_devices
        assert now == methods, "TensorFlow's methods stay wrapped"
        """,
    )
    number = program.read_text().splitlines().index("x = tf.zeros([2])") + 1
    listed = f"{ROOT}/towers_of_mine.py:3"
    before = "call towers.devices.configure() before that line"
    assert lines == [
        f"--visible_gpus=0 comes too late, TensorFlow listed the devices at {listed}: {before}",
        "--gpu_memory_limit_mib=600 comes too late, TensorFlow started at "
        f"{program}:{number} (x = tf.zeros([2])): {before}",
        "placement   soft placement is off",
        "memory      no GPU here: --gpu_memory_limit_mib=512 has nothing to act on",
        "warning     CUDA_VISIBLE_DEVICES=0 came too late: TensorFlow had listed its devices by "
        f"then, at {listed}",
    ]


def test_tensorflow_that_had_started_before(tmp_path):
    assert run(
        tmp_path / "program.py",
        """
        import tensorflow as tf
        x = tf.zeros([2])
        from towers import devices
        devices.configure()
        print(*devices.report(devices.tower_devices()), sep="\\n")
        for options in {"allow_growth": True}, {"visible_gpus": "1"}:
            try:
                devices.configure(**options)
            except ValueError as error:
                print(error)
        """,
        CUDA_VISIBLE_DEVICES="0",
    )[3:] == [
        f"--{option} comes too late, TensorFlow {event} at a line that ran before towers.devices "
        "was imported: call towers.devices.configure() before that line"
        for option, event in (
            ("allow_growth=True", "started"),
            ("visible_gpus=1", "listed the devices"),
        )
    ]


def test_the_first_call_of_a_program_is_in_time(tmp_path):
    assert run(
        tmp_path / "program.py",
        """
        import tensorflow as tf
        from towers import devices
        devices.configure(visible_gpus="none", per_process_gpu_memory_fraction=0.4)
        names = devices.tower_devices(2)
        print(names)
        print(*devices.report(names), sep="\\n")
        assert tf.config.get_soft_device_placement()
        """,
        CUDA_VISIBLE_DEVICES='"0,1"',
    ) == [
        "['/cpu:0', '/cpu:1']",
        "devices",
        "  tower  device  PCI bus id  driver  total MiB  free MiB  name",
        f"  0      /cpu:0  -           -       -          -         {CPU}",
        f"  1      /cpu:1  -           -       -          -         {CPU}",
        "memory      no GPU here: --per_process_gpu_memory_fraction=0.4 has nothing to act on",
    ]
