"""Counts what a step would do on GPUs, on a machine that need not have any.

    python scripts/gpu_table.py [--models=models.cnn:cnn,...] [--num_towers=1,2]
        [--dtypes=float32,mixed_bfloat16] [--variables=replicated]

A row for each: ops without a GPU kernel; copies of data in an unmeasured step, of the busiest GPU,
as "once + in each iteration of the model's loops"; collectives; kernels that a tower starts, and
what is not of a tower. `towers plan` says the same of one model, with its layers.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from towers import data, devices, formatting  # noqa: E402
from towers.commands.plan import command  # noqa: E402
from towers.options.run import Options  # noqa: E402

# The data set of each model that is tried.
MODELS = {
    "models.cnn:cnn": "shapes",
    "models.resnet:resnet20": "shapes",
    "tests.user_models:lstm": "tests.user_models:text",
    "tests.user_models:transformer": "tests.user_models:text",
}
HEADER = (
    "model", "GPUs", "dtype", "no kernel", "from host", "to host", "from GPUs", "collectives",
    "launches: tower", "launches: rest",
)  # fmt: skip


def row(model: str, num_towers: int, dtype: str, variables: str) -> list[str]:
    """Return the counts of a step."""
    options = Options(
        model=model, dataset=MODELS[model], batch_size=64, dtype=dtype, variables=variables
    )
    described = command.describe(command.estimate(options, num_towers, data.load(options.dataset)))
    copies = []
    for way in ("from_host", "to_host", "from_gpus"):
        repeated = described[way]["repeated"]
        copies.append(f"{described[way]['count'] - repeated}" + f" + {repeated}" * bool(repeated))
    missing, launches = described["without_kernel"], described["launches"]
    counts = [len(missing), *copies, described["collectives"]["count"], *launches.values()]
    name = model.partition(":")[2]
    return [name, str(num_towers), dtype, *map(str, counts)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--num_towers", default="1,2")
    parser.add_argument("--dtypes", default="float32,mixed_bfloat16")
    parser.add_argument("--variables", default="replicated")
    flags = parser.parse_args()
    if unknown := set(flags.models.split(",")) - MODELS.keys():
        parser.error(f"--models={','.join(sorted(unknown))}: there are {', '.join(MODELS)}")
    numbers = [int(number) for number in flags.num_towers.split(",")]
    devices.tower_devices(max(numbers) + 1, "cpu")  # the first one stays the host's
    tf.get_logger().setLevel("ERROR")
    cases = itertools.product(flags.models.split(","), numbers, flags.dtypes.split(","))
    rows = [row(*case, flags.variables) for case in cases]
    print("\n".join(formatting.markdown(HEADER, rows)))


if __name__ == "__main__":
    main()
