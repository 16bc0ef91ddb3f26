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
    """Return the driver's numbers of the GPUs of each place at which a run can go.

    Each place gets as many as any other, so that runs can be compared; what is left over stays
    idle. With one place, or without GPUs, nothing is dealt: [] leaves a run what it finds.

    Args:
        runs: of the sweep.
        parallel: number of places.
        driver: all GPUs of the machine.
        environ: the environment, whose CUDA_VISIBLE_DEVICES counts.

    Raises:
        InputError: there are fewer GPUs than places, or a run needs more than a place has.
    """
    users = [run for run in runs if not on_cpu(run.options)]
    asked = {run.options.visible_gpus for run in users}
    gpus = _visible(users[0].options, driver, environ) if len(asked) == 1 else []
    if len(asked) > 1 and parallel > 1 and driver:
        raise InputError("--vary=visible_gpus: --parallel deals GPUs out itself; leave one out")
    if not gpus:
        return [[]] * parallel
    if parallel > len(gpus):
        raise InputError(
            f"--parallel={parallel}: there are {len(gpus)} visible GPUs, and each run needs its "
            f"own: type --parallel={len(gpus)}, or --devices=cpu"
        )
    share = len(gpus) // parallel
    for run in users:
        _check_share(run, share, parallel)
    if parallel == 1:
        return [[]]
    return [gpus[place * share : (place + 1) * share] for place in range(parallel)]


def on_cpu(options: Options) -> bool:
    """Tell whether a run leaves all GPUs alone."""
    devices = options.devices.lower()
    return "cpu" in devices and "gpu" not in devices or options.visible_gpus.lower() == "none"


def _visible(
    options: Options, driver: Sequence[DriverGpu], environ: Mapping[str, str]
) -> list[int]:
    """Return the numbers of the GPUs that the runs may use."""
    tidy = dict(environ)
    visibility.tidy(tidy)
    if options.visible_gpus:
        visibility.visible_positions(options.gpu_options(), driver, tidy)
        return options.gpu_options().indices()
    return [gpu.index for gpu in visibility.visible_in(tidy, driver)]


def _check_share(run: PlannedRun, share: int, parallel: int) -> None:
    """Refuse a run that needs more GPUs than its place has."""
    names = [name for name in run.options.devices.split(",") if name.strip()]
    numbers = [name.rpartition(":")[2] for name in names if "gpu" in name.lower()]
    highest = max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)
    needed = max(highest, 0 if names else run.options.num_towers)
    if needed > share:
        flag = f"--devices={run.options.devices}" if names else f"--num_towers={needed}"
        places = f" with --parallel={parallel}" if parallel > 1 else ""
        remedy = f"type --parallel={parallel - 1 or 1}" if parallel > 1 else "type --num_towers=0"
        raise InputError(
            f"the run {run.name}: {flag} needs {needed} GPUs, and a run gets {share}{places}: "
            f"{remedy}"
        )
