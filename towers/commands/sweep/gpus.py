"""Which GPUs each of the runs gets that a sweep has going at a time."""

from collections.abc import Mapping, Sequence

from towers.commands.sweep.combinations import PlannedRun
from towers.devices import visibility
from towers.devices.nvml import DriverGpu
from towers.errors import InputError
from towers.options.run import Options


def deal(
    runs: Sequence[PlannedRun],
    parallel: int,
    driver: Sequence[DriverGpu],
    environ: Mapping[str, str],
) -> list[list[int]]:
    """Return the driver's numbers of the GPUs of each of the `parallel` places for a run.

    Each place gets as many as any other, so that runs can be compared; what is left over stays
    idle. With one place, or without GPUs, nothing is dealt: [] leaves a run what it finds.

    Raises:
        InputError: there are fewer GPUs than places, or a run needs more than a place has.
    """
    users = [run for run in runs if not on_cpu(run.options)]
    asked = {run.options.visible_gpus for run in users}
    if len(asked) > 1 and parallel > 1 and driver:
        raise InputError("--vary=visible_gpus: --parallel deals GPUs out itself; leave one out")
    if len(asked) != 1:
        return [[]] * parallel
    environ = dict(environ)
    visibility.set_visible(users[0].options.gpu_options(), driver, environ)
    gpus = [gpu.index for gpu in visibility.visible_in(environ, driver)]
    if not gpus:
        return [[]] * parallel
    if parallel > len(gpus):
        raise InputError(
            f"--parallel={parallel}: there are {len(gpus)} visible GPUs, and each run needs its "
            f"own: type --parallel={len(gpus)}, or --devices=cpu"
        )
    share = len(gpus) // parallel
    for run in users:
        needed = 0 if run.options.devices else run.options.num_towers
        if needed > share:
            remedy = "--num_towers=0" if parallel == 1 else f"--parallel={parallel - 1}"
            raise InputError(
                f"the run {run.name}: --num_towers={needed} needs {needed} GPUs, and a run gets "
                f"{share} with --parallel={parallel}: type {remedy}"
            )
    if parallel == 1:
        return [[]]
    return [gpus[place * share : (place + 1) * share] for place in range(parallel)]


def on_cpu(options: Options) -> bool:
    """Tell whether a run leaves all GPUs alone."""
    devices = options.devices.lower()
    return "cpu" in devices and "gpu" not in devices or options.visible_gpus.lower() == "none"
