"""Write kernels.pbtxt: the kernels for GPUs that TensorFlow has with CUDA and has not without.

    python tests/gpu/make_kernels.py .venv/bin/python .venv-gpu/bin/python

The first Python has `tensorflow`, the second `tensorflow-cpu` of the same version, into which these
GPUs are not built yet. A line is a `KernelDef` of the file's one `KernelList`; kernels that differ
in one attribute alone share a line.
"""

import collections
import subprocess
import sys
from pathlib import Path

from google.protobuf import text_format
from tensorflow.core.framework import kernel_def_pb2

_PRINT = """
import sys
from tensorflow.python.framework import kernels
sys.stdout.buffer.write(kernels.get_all_registered_kernels().SerializeToString())
"""


def registered(python: str) -> set[tuple]:
    """Return (op, device, priority, host arguments, constraints) of a TensorFlow's GPU kernels.

    Constraints are ((attribute, {(field of AttrValue's list, value)}), ...).
    """
    output = subprocess.run([python, "-c", _PRINT], check=True, capture_output=True).stdout
    found = set()
    for kernel in kernel_def_pb2.KernelList.FromString(output).kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label:
            allowed = {
                c.name: frozenset(
                    (field.name, value)
                    for field, values in c.allowed_values.list.ListFields()
                    for value in values
                )
                for c in kernel.constraint
            }
            names = kernel.op, kernel.device_type, kernel.priority, tuple(kernel.host_memory_arg)
            found.add((*names, tuple(sorted(allowed.items(), key=lambda item: item[0]))))
    return found


def merged(kernels: set[tuple]) -> set[tuple]:
    """Return the same kernels, those that differ in what one attribute may be as one."""
    for place in range(max(len(kernel[-1]) for kernel in kernels)):
        groups = collections.defaultdict(frozenset)
        for *names, constraints in kernels:
            rest, values = list(constraints), frozenset()
            if place < len(rest):
                attribute, values = rest[place]
                rest[place] = attribute, None
            groups[(*names, tuple(rest))] |= values
        kernels = {
            (*names, tuple((name, groups[(*names, rest)] if v is None else v) for name, v in rest))
            for *names, rest in groups
        }
    return kernels


def text(kernels: set[tuple]) -> str:
    """Return a `KernelList` as text, a line for each kernel."""
    lines = []
    for op, device, priority, host, constraints in kernels:
        kernels = kernel_def_pb2.KernelList()
        kernel = kernels.kernel.add(op=op, device_type=device, host_memory_arg=host)
        kernel.priority = priority
        for name, values in constraints:
            allowed = kernel.constraint.add(name=name).allowed_values.list
            for field, value in sorted(values):
                getattr(allowed, field).append(value)
        lines.append(text_format.MessageToString(kernels, as_one_line=True).strip() + "\n")
    return "".join(sorted(lines))


if __name__ == "__main__":
    with_cuda, without = map(registered, sys.argv[1:3])
    missing = with_cuda - without
    lines = text(merged(missing))
    Path(__file__).with_name("kernels.pbtxt").write_text(lines, encoding="utf-8")
    ops = len({kernel[0] for kernel in missing})
    print(f"{len(missing)} kernels of {ops} ops in {lines.count(chr(10))} lines")
