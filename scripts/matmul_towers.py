"""The guides' two-tower product: a matmul on each tower, add_n on the CPU, and where each op ran.

python scripts/matmul_towers.py [--num_towers=2]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

import towers  # noqa: E402
from towers.devices.selection import tower_devices  # noqa: E402
from towers.graphs.placement import read_placement  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_towers", type=int, default=2)
    builder = towers.TowerBuilder(tower_devices(parser.parse_args().num_towers))
    a = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[2, 3])
    b = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], shape=[3, 2])

    @tf.function
    def product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return builder.sum(lambda: tf.matmul(a, b))

    placement = read_placement(product, a, b)
    print(product(a, b).numpy())
    for op in placement.ops:
        if "MatMul" in op.type or op.type == "AddN":
            print(f"{op.name:20} {op.type:12} {op.device}")


if __name__ == "__main__":
    main()
