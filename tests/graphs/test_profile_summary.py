"""The most expensive ops, from made-up traces of CPUs and GPUs."""

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers.graphs.placement import Op, Placement
from towers.graphs.profile_summary import OUTSIDE, XLA, copies, op_times, problems, report

pytestmark = pytest.mark.unit

MS = 10**9  # picoseconds
BODY, FILTER = "while/body/_1/while", "while/tower_0/net/conv/Filter"


def plane(space, name, **lines):
    """Add a plane of threads or streams with events (start in ms, duration in ms, name, stats)."""
    added = space.planes.add(name=name)
    numbers = {}

    def number(table, name):
        key = numbers.setdefault((id(table), name), len(numbers) + 1)
        table[key].id, table[key].name = key, name
        return key

    for line_name, events in lines.items():
        line = added.lines.add(name=line_name.replace("_", " "))
        for start, duration, event_name, *stats in events:
            event = line.events.add(
                metadata_id=number(added.event_metadata, event_name),
                offset_ps=round(start * MS),
                duration_ps=round(duration * MS),
            )
            for key, value in stats[0].items() if stats else ():
                stat = event.stats.add(metadata_id=number(added.stat_metadata, key))
                if key in ("tf_op", "name"):  # TensorFlow keeps such names once
                    stat.ref_value = number(added.stat_metadata, value)
                else:
                    stat.str_value = value
    return space


def host(**threads):
    return plane(xplane_pb2.XSpace(), "/host:CPU", **threads)


def placement(compiled=(), **ops):
    """Return the placement of ops, given as device="name name"."""
    placed = [
        Op(name, "?", "", f"/{device.replace('_', ':')}")
        for device, names in ops.items()
        for name in names.split()
    ]
    return Placement(tuple(placed), (), (), tuple(compiled))


TWO = placement(
    cpu_0="while/tower_0/net/conv/convolution while/gather/AddN while/update/sgd/Sub "
    f"gradient_tape/while/tower_0/net/conv/Filter {BODY}/gather/AddN/_7",
    cpu_1="while/tower_1/net/conv/convolution while/tower_1/PartitionedCall",
)


def milliseconds(space, where=TWO):
    """Return {(device, stage, layer, type): (calls, ms)}."""
    return {
        (row.device, row.stage, row.layer, row.type): (row.calls, round(1e3 * row.seconds, 6))
        for row in op_times(space, where)
    }


def test_ops_go_to_the_device_of_their_name():
    space = host(
        one=[
            (0, 2, f"{BODY}/tower_0/net/conv/convolution:Conv2D"),
            (5, 1, f"{BODY}/tower_0/net/conv/convolution:Conv2D"),
            (7, 3, f"while/body/_1/gradient_tape/{FILTER}:Conv2DBackpropFilter"),
            (10, 0.5, f"{BODY}/gather/AddN:AddN"),
            (12, 0.25, f"{BODY}/update/sgd/Sub:Sub"),
        ],
        two=[
            (0, 4, f"{BODY}/tower_1/net/conv/convolution:_MklNativeFusedConv2D"),
            (4, 1, f"{BODY}/tower_1/net/conv/convolution:StopGradient"),
        ],
    )
    assert milliseconds(space) == {
        ("/cpu:0", "forward", "net/conv", "Conv2D"): (2, 3),
        ("/cpu:0", "backward", "net/conv", "Conv2DBackpropFilter"): (1, 3),
        ("/cpu:0", "", "gather", "AddN"): (1, 0.5),
        ("/cpu:0", "", "update/sgd", "Sub"): (1, 0.25),
        ("/cpu:1", "forward", "net/conv", "FusedConv2D"): (1, 4),
        ("/cpu:1", "forward", "net/conv", "StopGradient"): (1, 1),
    }


def test_nested_time_counts_once_and_waiting_not_at_all():
    space = host(
        one=[
            (0, 100, "train"),
            (0, 10, f"{BODY}/tower_0/net/conv/convolution:Conv2D"),
            (1, 8, "ParallelFor"),  # a part of the op around it
            (2, 3, f"{BODY}/gather/AddN:AddN"),
            (3, 1, f"{BODY}/update/sgd/Sub:Sub"),
            (6, 2, "ExecutorState::Process"),  # chooses the next op
            (10, 2, f"{BODY}/update/sgd/Sub:Sub"),  # begins where another ends
            (30, 9, f"{BODY}/tower_1/x/_42:_Recv"),
        ]
    )
    times = {key[3]: value for key, value in milliseconds(space).items()}
    assert times == {"Conv2D": (1, 5), "AddN": (1, 2), "Sub": (2, 3)}


def test_what_is_not_in_the_step_is_told_apart():
    space = host(
        one=[
            (0, 1, "while/tower_0/evaluated/conv/convolution:Conv2D"),
            (1, 2, "GatherV2:GatherV2"),
            (3, 9, "Iterator::Root::Prefetch::Map"),
            (20, 9, "EagerLocalExecute: AddV2"),
            (40, 5, "fusion.1", {"hlo_op": "fusion.1", "hlo_module": "a"}),
        ]
    )
    found = sorted((key[0], value) for key, value in milliseconds(space).items())
    assert found == [(OUTSIDE, (1, 1)), (OUTSIDE, (1, 2)), (XLA, (1, 5))]


GPUS = placement(
    gpu_0="while/tower_0/net/conv/convolution",
    gpu_1="while/tower_1/net/conv/convolution",
    cpu_0="while/gather/AddN",
)


def test_kernels_of_gpus():
    name = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>"
    first = {"tf_op": f"{BODY}/tower_0/net/conv/convolution:Conv2D"}
    second = {"tf_op": f"{BODY}/tower_1/net/conv/convolution:Conv2D#shape=(1,2)#"}
    copy = {"tf_op": f"{BODY}/gather/AddN:AddN"}
    space = host(one=[(0, 50, first["tf_op"]), (60, 2, copy["tf_op"])])
    plane(
        space,
        "/device:GPU:0 NVIDIA A100",
        **{
            "Stream_#13(Compute)": [(0, 3, name, first), (3, 4, "scale", first), (9, 1, name)],
            "Stream_#15(MemcpyD2H)": [(5, 2, "MemcpyD2H", copy)],
            "TensorFlow_Ops": [(0, 7, "Conv2D", first)],
        },
    )
    xla = {"hlo_op": "fusion.3", "hlo_module": "a"}
    stream = [(0, 8, name, second), (9, 4, "fusion_3", xla)]
    plane(space, "/device:GPU:1", **{"Stream_#13(Compute)": stream})
    plane(space, "/host:CUPTI", one=[(0, 90, "cuLaunchKernel", first)])
    assert milliseconds(space, GPUS) == {
        ("/cpu:0", "", "gather", "AddN"): (1, 2),
        ("/gpu:0", "forward", "net/conv", "Conv2D"): (2, 7),
        ("/gpu:0", "", "gather", "AddN"): (1, 2),
        ("/gpu:0", "", "-", name): (1, 1),
        ("/gpu:1", "forward", "net/conv", "Conv2D"): (1, 8),
        ("/gpu:1", "", "-", "XLA: fusion"): (1, 4),
    }


def test_copies_of_gpus():
    def copied(size):
        return {"memcpy_details": f"kind_src:host kind_dst:device size:{size} dest:0 async:1"}

    space = host(one=[(0, 9, "MemcpyH2D")])
    assert copies(space) is None
    up = [(0, 1, "MemcpyH2D", copied(100)), (2, 1, "MemcpyH2D", copied(20)), (4, 1, "scale")]
    lines = {"Stream_#14(MemcpyH2D)": up, "Stream_#15(Compute)": [(0, 1, "MemcpyD2D", copied(7))]}
    plane(space, "/device:GPU:0 NVIDIA A100", **lines, TensorFlow_Ops=[(0, 1, "MemcpyH2D")])
    plane(space, "/device:GPU:1", **{"Stream_#15(MemcpyP2P)": [(0, 1, "MemcpyP2P", copied(8))]})
    found = {"host to GPU": (2, 120), "GPU to host": (0, 0), "GPU to GPU": (1, 8)}
    assert copies(space) == found


def test_problems_are_told():
    space = host(one=[(0, 2, f"{BODY}/gather/AddN:AddN")])
    space.errors.append("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\nmore")
    first, second = problems(space, op_times(space, GPUS), GPUS)
    assert first == "warning: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
    assert "no kernel of /gpu:0, /gpu:1 was recorded" in second
    assert problems(host(), [], TWO) == []


def test_ten_ops_of_each_device():
    names = [f"while/tower_{tower}/layer{i}/x" for tower in (0, 1) for i in range(12)]
    where = placement(cpu_0=" ".join(names[:12]), cpu_1=" ".join(names[12:]))
    space = host(one=[(20 * i, 1 + i % 12, f"{name}:Add") for i, name in enumerate(names)])
    lines = report(op_times(space, where), num_steps=2)
    assert lines[0] == "/cpu:0: busy 78.000 ms, 39.000 ms a step; 10 of 12 ops"
    assert lines[12].startswith("/cpu:1: ")
    assert [line.split()[-1] for line in lines[2:12]] == [f"layer{i}" for i in range(11, 1, -1)]
    assert lines[2].split() == ["1", "12.000", "15.4", "6.000", "forward", "Add", "layer11"]
