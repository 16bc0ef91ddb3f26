"""Counts the kernels, copies and collectives of a step on GPUs, on a machine without GPUs.

    python scripts/count_step.py [--models=cnn,resnet20,transformer] [--num_towers=1,2,8]
        [--by=train,fit] [--variables=default] [--dtype=float32] [--list]

Logical CPUs stand in for GPUs (--num_towers=0: plain `fit` on one), and no step is made: the counts
are read from the graph that TensorFlow executes. Its wheel knows its GPU kernels on any machine,
and which of their arguments are in the host's memory. A value that is made in one memory and read
in another is copied in each step, a constant too, and each copy to the host is a wait. Counts are
those of the busiest GPU; "+ 5" are copies in loops of the model, which each iteration makes. Steps
that telemetry measures and TensorFlow's fusions on GPUs are left out. So is cuDNN, which Keras
calls for an LSTM or a GRU whose arguments allow it; here such a layer is a loop.
"""

import argparse
import functools
import importlib
import inspect
import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import keras
    import numpy as np
    import tensorflow as tf
    from tensorflow.python.framework import kernels, op_def_registry

import towers  # noqa: E402
from towers import devices, tf_internals  # noqa: E402
from towers.builder import device_names  # noqa: E402
from towers.builder.device_names import tower_of  # noqa: E402
from towers.commands.verify.fit import not_fused  # noqa: E402
from towers.formatting import markdown  # noqa: E402
from towers.graphs.placement import traced_name, traced_ops  # noqa: E402
from towers.options.run import Options  # noqa: E402
from towers.training.run.setup import assemble, load_data  # noqa: E402

HOST = "host"
EXAMPLES = 64  # for each GPU
# Each model's function, its data set, and the shape of an image that `fit` is given.
MODELS = {
    "cnn": ("models.cnn:cnn", "shapes", (24, 24, 3)),
    "resnet20": ("models.resnet:resnet20", "shapes", (32, 32, 3)),
    "lstm": ("tests.user_models:lstm", "tests.user_models:text", None),
    "transformer": ("tests.user_models:transformer", "tests.user_models:text", None),
}
HEADER = (
    "model", "GPUs", "by", "no kernel", "no device", "from host", "to host", "from GPUs",
    "all between GPUs", "all-reduces + gathers", "bytes / least", "launches: tower", "rest",
)  # fmt: skip
_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_LOOP = re.compile(r"(?:^|/)(?:body|cond)/_\d+(?=/)")
_PLUMBING = frozenset(
    "Enter Exit Merge Switch LoopCond NextIteration Identity NoOp Const _Arg _Retval".split()
)
# Ops that launch no kernel: these, other names of a buffer (an unpacked row, too), transfers.
_NO_LAUNCH = _PLUMBING | frozenset(
    "IdentityN Reshape Squeeze ExpandDims Bitcast StopGradient PreventGradient Assert "
    "PlaceholderWithDefault ReadVariableOp AssignVariableOp CollectiveReduceV2 "
    "CollectiveGatherV2".split()
)

Argument = tuple[tf.DType, bool]  # the flag: whether it is in the host's memory


class Kernel(NamedTuple):
    """An op's kernel on a GPU."""

    type: str  # the op that users know
    exists: bool  # for these types; without one the op runs on the host
    inputs: list[Argument]
    outputs: list[Argument]
    launches: int  # at least; 0 also if all outputs are in the host's memory, such as shapes


class Node:
    """A node of an executed graph.

    Attributes:
        gpu: "/gpu:0", or "" for the host.
        traced: the traced op, or None for a node that TensorFlow added.
        depth: number of loops around it: the one over the steps, and those of the model.
        takers: its consumers: (output number, None for a control edge; node; input number).
    """

    def __init__(self, proto: Any, traced: Mapping[str, tf.Operation], depth: int = 0):
        """Read a node of a function with these ops by name, with so many loops around it."""
        number = int(proto.device.rpartition("CPU:")[2] or 0)
        on_gpu = number and proto.op != "IteratorGetNext"  # which is the host's, too
        self.gpu = f"/gpu:{number - 1}" if on_gpu else ""
        self.proto, self.name = proto, traced_name(proto.name, traced)
        self.traced = traced.get(self.name)
        self.kernel = _gpu_kernel(proto, self.traced.type if self.traced else "")
        self.depth = depth + len(_LOOP.findall(proto.name)) + ("/LoopCond/" in proto.name)
        self.takers: list[tuple[int | None, Node, int]] = []

    def num_bytes(self, index: int = 0) -> int:
        """Return the bytes of an output, 0 if its shape is unknown."""
        tensors = self.traced.outputs[index : index + 1] if self.traced else []
        if not tensors:  # TensorFlow added this node: read the inputs of its traced consumers
            takers = [(taker.traced, place) for i, taker, place in self.takers if i == index]
            tensors = [op.inputs[i] for op, i in takers if op and i < len(op.inputs)]
        return max(map(num_bytes, tensors), default=0)


class Copy(NamedTuple):
    """A value that is copied between memories in each step."""

    name: str  # traced name of the op that makes it
    type: str  # of that op
    bytes: int  # 0 if the shape is unknown
    source: str  # "host" or "/gpu:0"
    target: str
    repeated: bool  # in a loop of the model, such as an LSTM's


class Step(NamedTuple):
    """The ops of a step that run on GPUs, and its copies; those in a model's loop once."""

    ops: list[Node]
    copies: list[Copy]
    weights: int = 0  # their bytes

    @property
    def without_kernel(self) -> list[str]:
        """Ops without a GPU kernel: they fall back to the CPU, or fail without soft placement."""
        missing = (op for op in self.ops if not op.kernel.exists)
        return [f"{op.kernel.type} of {op.kernel.inputs[0][0].name}, {op.name}" for op in missing]

    @property
    def undirected(self) -> list[str]:
        """Ops that request no device, and are not with a variable: they go to the first GPU."""
        ops = (op for op in self.ops if op.kernel.exists and op.proto.op not in _PLUMBING)
        asking = (op for op in ops if op.traced is not None and not op.traced.device)
        return [op.name for op in asking if tf.resource not in dict(op.kernel.inputs)]

    def launches(self, of_towers: bool) -> int:
        """Return the kernels of the busiest tower, or of everything else on the busiest GPU."""
        total: Counter[object] = Counter()
        for op in self.ops:
            tower = tower_of(op.name)
            if (tower is not None) == of_towers:
                total[tower if of_towers else op.gpu] += op.kernel.launches
        return max(total.values(), default=0)

    def transfers(self, source: str = "", target: str = "") -> list[Copy]:
        """Return the copies from and to "host", a GPU, or "gpu" for all GPUs; "": all."""
        of_source = (c for c in self.copies if source in ("", c.source, c.source[1:4]))
        return [c for c in of_source if target in ("", c.target, c.target[1:4])]


def read(function: Any, *arguments: Any, call: Callable | None = None, depth: int = 0) -> Step:
    """Call a `tf.function` for the first time and return one step as GPUs would make it.

    Args:
        function: a train loop, built under `device_names.cpus_for_gpus`.
        *arguments: of the call, such as 0 steps, so that it does no work.
        call: calls the function with these arguments, as `fit` does; by default the function.
        depth: 1 if a call of the function is one step, 0 if it is a loop over steps.
    """
    # Ops that request no device go to the first GPU.
    with device_names.cpus_for_gpus(), not_fused(), tf.device("/cpu:1"):
        with tf_internals.executed_graphs() as functions:
            (call or function)(*arguments)
        concrete = function.get_concrete_function(*arguments)
    # The smaller functions have made the variables.
    graphs = max(functions, key=lambda executed: sum(len(graph.node) for graph in executed))
    nodes = read_nodes(graphs, dict(traced_ops(concrete.graph)), depth)
    measured: set[Node] = set()  # those that run only in steps that telemetry measures
    waiting = [n for n in nodes if n.proto.op == "Switch" and "/telemetry" in n.proto.name]
    while waiting:
        node = waiting.pop()
        if node not in measured and node.proto.op != "Merge":
            measured.add(node)
            waiting += [taker for _, taker, _ in node.takers]
    nodes = [node for node in nodes if node not in measured]
    # Ops outside of the loop over the steps run once a call.
    return Step([node for node in nodes if node.gpu and node.depth], list(_copies(nodes)))


def read_nodes(graphs: Iterable, traced: Mapping[str, Any], depth: int = 0) -> list[Node]:
    """Return the nodes of the executed graphs, one for each device, joined and without sends."""
    joined, sends = [], {}
    for graph in graphs:
        nodes = {proto.name: Node(proto, traced, depth) for proto in graph.node}
        for node in nodes.values():
            if node.proto.op in _SENDS:
                sends[node.proto.attr["tensor_name"].s] = nodes, node.proto.input[0]
            elif node.proto.op not in _RECEIVES:
                joined.append((nodes, node))
    for nodes, node in joined:
        for i, source in enumerate(node.proto.input):
            producer, index = _producer(source, nodes, sends)
            producer.takers.append((index, node, i))
    return [node for _, node in joined]


def _producer(source: str, nodes: Mapping, sends: Mapping) -> tuple[Node, int | None]:
    # The node, maybe on another device, and the number of its output.
    name, _, index = source.lstrip("^").partition(":")
    waits = source.startswith("^")
    if nodes[name].proto.op not in _RECEIVES:
        return nodes[name], None if waits else int(index or 0)
    there, sent = sends[nodes[name].proto.attr["tensor_name"].s]
    if "/ctrl/" in sent:  # a control edge is sent as an empty constant
        sent = there[sent.partition(":")[0]].proto.input[0]
    producer, number = _producer(sent, there, sends)
    return producer, None if waits else number


def _copies(nodes: Iterable[Node]) -> Iterator[Copy]:
    def memory(node: Node, arguments: list[Argument], index: int) -> str:
        on_host = index < len(arguments) and arguments[index][1]  # oneDNN has more outputs
        return HOST if on_host or not node.gpu else node.gpu

    for node in nodes:
        # A value is copied once to each memory for each device's part of the graph.
        depths: dict[tuple, int] = defaultdict(int)
        for index, taker, place in node.takers:
            if index is not None:
                source = memory(node, node.kernel.outputs, index)
                target = memory(taker, taker.kernel.inputs, place)
                way = index, taker.gpu, source, target
                depths[way] = max(depths[way], node.depth, taker.depth)
        for (index, _, source, target), depth in depths.items():
            if depth and source != target:
                size = node.num_bytes(index)
                yield Copy(node.name, node.kernel.type, size, source, target, depth > 1)


def num_bytes(tensor: tf.Tensor | tf.Variable) -> int:
    """Return the bytes of a tensor, 0 if its shape is unknown or it is a resource."""
    known = tensor.shape.is_fully_defined() and tensor.dtype.size
    return tensor.shape.num_elements() * tensor.dtype.size if known else 0


def _gpu_kernel(node: Any, traced_type: str) -> Kernel:
    # Of a node of the graph for CPUs; the traced op's type is "" if none was traced.
    kind, num_ops = _replaced_ops(node, traced_type)
    definition = op_def_registry.get(kind)
    if definition is None:  # a call of a function
        return Kernel(kind, True, [], [], 1)
    on_host = None
    for kernel in reversed(_kernels(kind)):
        if all(_items(node.attr[c.name]) <= _items(c.allowed_values) for c in kernel.constraint):
            on_host = kernel.host_memory_arg
    inputs = _arguments(node, definition.input_arg, on_host)
    outputs = _arguments(node, definition.output_arg, on_host)
    computes = not outputs or any(not there and dtype != tf.variant for dtype, there in outputs)
    free = kind in _NO_LAUNCH or (kind == "Unpack" and not node.attr["axis"].i)
    launches = 0 if on_host is None or free or not computes else num_ops
    return Kernel(kind, on_host is not None, inputs, outputs, launches)


def _replaced_ops(node: Any, traced_type: str) -> tuple[str, int]:
    # The first op that an op for CPUs, such as oneDNN's, replaces, and the number of ops.
    if node.op == "_UnaryOpsComposition":
        names = node.attr["op_names"].list.s
        return names[0].decode(), len(names)
    if not node.op.startswith("_Mkl"):
        return node.op, 1
    name = re.sub(r"^_Mkl(Native)?", "", node.op)
    plain = re.sub(r"WithBias$|^PadWith", "", name)
    known = op_def_registry.get(plain) is not None
    return (plain, 1 + (plain != name)) if known else (traced_type or plain, 1)


@functools.cache
def _kernels(op_type: str) -> list[Any]:
    # A kernel for GPUs comes before one for any device.
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return [k for device in ("GPU", "DEFAULT") for k in registered if k.device_type == device]


def _items(value: Any) -> set:
    # Types or texts of an attribute.
    one = value.s if value.HasField("s") else value.type
    return set(value.list.type or value.list.s) if value.HasField("list") else {one}


def _arguments(node: Any, arguments: Iterable, on_host: Sequence[str] | None) -> list[Argument]:
    # An argument of an op may be a list of tensors; without a kernel all are on the host.
    expanded = []
    for argument in arguments:
        kinds = [argument.type or node.attr[argument.type_attr].type]
        if argument.type_list_attr:
            kinds = list(node.attr[argument.type_list_attr].list.type)
        elif argument.number_attr:
            kinds *= node.attr[argument.number_attr].i
        there = on_host is None or argument.name in on_host
        dtypes = map(tf.as_dtype, kinds)
        expanded += [(dtype, there or dtype in (tf.string, tf.resource)) for dtype in dtypes]
    return expanded


# ---------------------------------------------------------------------------- Ways to train


def of_train(options: Options, num_towers: int) -> Step:
    """Return the step of `towers train` on so many GPUs."""
    with device_names.cpus_for_gpus():
        run = assemble(options, devices.tower_devices(num_towers, "cpu"), load_data(options))
        step = read(run.train_loop(), iter(run.batches(0, 0)), tf.constant(0))
        return step._replace(weights=_bytes_of(run.train_state.model))


def of_fit(build: Callable[[], keras.Model], batches: Any, num_towers: int, **options: Any) -> Step:
    """Return the step of `fit` with these options of `parallelize`; for 0 towers of plain `fit`."""
    iterator = iter(batches)
    with device_names.cpus_for_gpus(), tf.device("/cpu:1"):  # where Keras makes them with a GPU
        model = build()
        if num_towers:
            given = {"devices": devices.tower_devices(num_towers, "cpu"), "check": "off"} | options
            towers.parallelize(model, **given)
        model.make_train_function()
        call, depth = model.train_function, int(model.steps_per_execution == 1)
        step = inspect.getclosurevars(inspect.unwrap(call)).nonlocals["multi_step_on_iterator"]
        step = read(step, iterator, call=call, depth=depth)
    return step._replace(weights=_bytes_of(model))


def _bytes_of(model: keras.Model) -> int:
    return sum(num_bytes(variable.value) for variable in model.trainable_variables)


def step_of(name: str, num_towers: int, by: str, variables: str, dtype: str) -> Step:
    """Return the step of one of MODELS, trained by "train" or "fit"."""
    (function, dataset, shape), size = MODELS[name], EXAMPLES * max(num_towers, 1)
    if by == "train":
        given = dict(model=function, dataset=dataset, batch_size=size, dtype=dtype)
        return of_train(Options(**given, variables=variables, check="off"), num_towers)

    def build() -> keras.Model:
        keras.config.set_dtype_policy(dtype)
        module, _, called = function.partition(":")
        model = getattr(importlib.import_module(module), called)()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
        return model

    draw = np.random.default_rng(0)
    x = draw.random((size, *shape), np.float32) if shape else draw.integers(1, 50, (size, 12))
    batches = tf.data.Dataset.from_tensors((x, draw.integers(0, 3, size))).repeat()
    return of_fit(build, batches, num_towers, variables=variables)


def row(step: Step) -> list[Any]:
    """Return the counts of a step, see HEADER."""
    gpus = sorted({op.gpu for op in step.ops})

    def busiest(ways: Iterable[list[Copy]]) -> str:
        marks = max(([copy.repeated for copy in way] for way in ways), key=len)
        return f"{marks.count(False)}" + f" + {sum(marks)}" * any(marks)

    cells: list[Any] = [len(step.without_kernel), len(step.undirected)]
    for source, target in (HOST, ""), ("", HOST), ("gpu", ""):
        cells.append(busiest(step.transfers(source or gpu, target or gpu) for gpu in gpus))
    own = [op for op in step.ops if op.gpu == gpus[0] and op.proto.op.startswith("Collective")]
    sums = [op.num_bytes() for op in own if "Reduce" in op.proto.op]
    # A ring all-reduce sends this share over each link (Patarasuk and Yuan 2009).
    share = 2 * (len(gpus) - 1) / len(gpus)
    ways = [way for gpu in gpus for way in (step.transfers("gpu", gpu), step.transfers(gpu, "gpu"))]
    moved = max(sum(copy.bytes for copy in way) for way in ways) + share * sum(sums)
    cells += [len(step.transfers("gpu", "gpu")), f"{len(sums)} + {len(own) - len(sums)}"]
    cells.append(f"{moved / share / step.weights:.2f}" if share else "-")
    return [*cells, step.launches(of_towers=True), step.launches(of_towers=False)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = {"models": "cnn,resnet20,transformer", "num_towers": "1,2,8", "by": "train,fit"}
    for name, default in (given | {"variables": "default", "dtype": "float32"}).items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--list", action="store_true", help="name copies, too")
    flags = parser.parse_args()
    numbers = [int(number) for number in flags.num_towers.split(",")]
    devices.tower_devices(max(1, *numbers) + 1, "cpu")  # the first one stays the host's
    tf.get_logger().setLevel("ERROR")
    cases, rows = (flags.models.split(","), numbers, flags.by.split(",")), []
    for name, number, by in itertools.product(*cases):
        step = step_of(name, number, by, flags.variables, flags.dtype)
        rows.append([name, number, by, *row(step)])
        if flags.list:
            print(*step.copies, *step.without_kernel, sep="\n")
    print("\n".join(markdown(HEADER, rows)))


if __name__ == "__main__":
    main()
