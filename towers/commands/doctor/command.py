"""`towers doctor`: small checks of the machine, each with what to type where something is wrong.

Nothing is created, downloaded or left behind. TensorFlow runs in processes of its own
(`towers.devices.probe`), so that even one that cannot be imported is only one of the findings.
"""

import os
from collections.abc import Callable, Iterator

from towers.commands.doctor import checks, gpus
from towers.commands.doctor.checks import NOTE, PROBLEM, Check
from towers.devices import nvml, visibility
from towers.errors import InputError
from towers.options.run import Options
from towers.text import count


def run(options: Options, say: Callable[[str], None]) -> list[Check]:
    """Look at versions, GPUs, data, disk and environment.

    Args:
        options: `train_dir`, `dataset`, `data_dir` and those of the GPUs count.
        say: is given each finding as soon as it is known, then a line that sums up.

    Returns:
        The findings, at least one.
    """
    found = []
    for check in _checks(options, dict(os.environ)):
        found.append(check)
        say(f"{check.status:8} {check.name:22} {check.detail}")
        if check.remedy:
            say(f"{'':8} {'':22} -> {check.remedy}")
    problems, notes = ([c.status for c in found].count(status) for status in (PROBLEM, NOTE))
    if problems:
        say(f"{count(problems, 'problem')} of {len(found)} checks")
    else:
        to_know = f", {count(notes, 'note')}" if notes else ""
        say(f"{len(found)} checks: all ok{to_know}")
    return found


def _checks(options: Options, environ: dict[str, str]) -> Iterator[Check]:
    yield from checks.check_versions()
    yield checks.check_environment(environ)
    yield checks.check_train_dir(options.train_dir)
    yield checks.check_data(options.dataset, options.data_dir)
    driver = nvml.gpus()
    try:
        visibility.set_visible(options.gpu_options(), driver, environ)
    except InputError as error:
        yield checks.refused("visible_gpus", error, "leave out --visible_gpus")
    yield from gpus.check_devices(driver, environ)
