"""Every test process sees four CPU devices, which stand in for GPUs."""

import atexit
import os
import shutil
import signal
import tempfile

import pytest

# Modules whose tests train for long or start processes; in others single tests are marked.
SLOW = {
    "fuzz/test_fuzz.py",
    "test_after_training.py", "test_equivalence.py", "test_packaging.py", "test_real_images.py",
    "test_alone.py", "test_zoo.py",
    "builder/test_batch_norm.py", "builder/test_draws.py", "builder/test_joined.py",
    "builder/test_rehearsal.py", "builder/test_threads.py", "builder/test_tower.py",
    "builder/test_xla.py", "commands/test_benchmark.py", "commands/test_export.py",
    "commands/test_plan.py", "commands/test_predict.py", "commands/test_sweep.py",
    "commands/test_tensorboard.py", "commands/test_verify.py", "commands/test_verify_fit.py",
    "data/test_encoded.py", "data/test_pipeline.py", "data/test_published.py",
    "devices/test_probe.py", "devices/test_worker.py", "graphs/test_gpu_step.py",
    "graphs/test_gpu_view.py", "graphs/test_placement.py", "graphs/test_placement_report.py",
    "graphs/test_profile_summary.py", "models/test_families.py", "models/test_models.py",
    "monitoring/test_dashboard.py",
    "monitoring/test_gallery.py", "monitoring/test_histograms.py", "monitoring/test_profiler.py",
    "monitoring/test_tower_stats.py", "scripts/test_accuracy.py", "scripts/test_fit_speed.py",
    "scripts/test_gpu_check.py",
    "scripts/test_gpu_steps.py", "scripts/test_local_cluster.py",
    "scripts/test_mirrored_faults.py", "scripts/test_peers.py", "scripts/test_scripts_exactness.py",
    "scripts/test_soak.py",
    "training/test_checkpoint.py", "training/test_evaluate.py", "training/test_exact_resume.py",
    "training/test_flat.py", "training/test_initial.py", "training/test_loading.py",
    "training/test_logits.py", "training/test_manifest.py", "training/test_parallel.py",
    "training/test_parallel_foreign.py", "training/test_step.py", "training/test_stop.py",
    "training/test_tower_board.py",
    "training/test_train.py", "training/test_update.py", "training/test_variables.py",
}  # fmt: skip

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Runs of the tests are not those of whoever starts them.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="towers-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
# So a shell starts what runs in the background, or under nohup, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path, config):
    """Leave out what is to run alone, unless it is named."""
    from tests.alone import ALONE

    alone = any(collection_path.as_posix().endswith(f"tests/{path}") for path in ALONE)
    named = any(collection_path.name in argument for argument in config.args)
    return True if alone and not named else None


def pytest_configure(config):
    """Make the devices before a test is read, which may make tensors.

    The options need none, nor does the process that hands tests out to the others.
    """
    starts_others = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if starts_others or all("tests/options" in argument for argument in config.args):
        return
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )


def pytest_collection_modifyitems(items):
    """Mark the tests that `scripts/test --fast` leaves out."""
    folder = os.path.dirname(__file__)
    for item in items:
        if os.path.relpath(item.path, folder) in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def float64():
    """Let Keras compute in float64, so that rounding cannot hide a fault."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy(before)


@pytest.fixture
def install(monkeypatch):
    """Return `install(*cards)`, which lets this process have those GPUs."""
    from tests import fake_gpus

    return lambda *cards, **details: fake_gpus.install(monkeypatch, *cards, **details)
