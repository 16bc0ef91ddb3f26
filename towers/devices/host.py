"""What a run stands on: versions, machine, and the environment variables that change numbers."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.devices import nvml
from towers.devices.nvml import MIB

# The names that are read, and no others: a prefix such as CUDA_ would let passwords through.
ENVIRONMENT = tuple(
    """
    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_FORCE_PTX_JIT
    CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_VISIBLE_DEVICES
    DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA
    KERAS_BACKEND KERAS_HOME KMP_AFFINITY KMP_BLOCKTIME KMP_DETERMINISTIC_REDUCTION KMP_SETTINGS
    LD_LIBRARY_PATH LD_PRELOAD MKL_CBWR MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS
    NCCL_ALGO NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE
    NCCL_SOCKET_IFNAME NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES
    OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE
    ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA OPENBLAS_NUM_THREADS
    PYTHONHASHSEED PYTHONOPTIMIZE PYTHONPATH
    TF_AUTOTUNE_THRESHOLD TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL TF_CONFIG
    TF_CONV2D_USE_FP16_ACCUMULATE TF_CUBLAS_WORKSPACE_LIMIT_IN_MB TF_CUDNN_DETERMINISTIC
    TF_CUDNN_DISABLE_CONV_1X1_OPTIMIZATION TF_CUDNN_RESET_RND_GEN_STATE
    TF_CUDNN_RNN_USE_AUTOTUNE TF_CUDNN_USE_AUTOTUNE TF_CUDNN_USE_FRONTEND
    TF_CUDNN_USE_RUNTIME_FUSION TF_CUDNN_WORKSPACE_LIMIT_IN_MB TF_DATA_EXPERIMENT_OPT_IN
    TF_DATA_EXPERIMENT_OPT_OUT TF_DETERMINISTIC_OPS TF_DETERMINISTIC_ORDER
    TF_DISABLE_JIT_KERNELS TF_DISABLE_SCATTER_OP_DETERMINISM
    TF_DISABLE_SEGMENT_REDUCTION_OP_DETERMINISM_EXCEPTIONS TF_ENABLED_DEVICE_TYPES
    TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32 TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32
    TF_ENABLE_GPU_GARBAGE_COLLECTION TF_ENABLE_MAXPOOL_NANPROP TF_ENABLE_ONEDNN_OPTS
    TF_ENABLE_ONEDNN_SPMM TF_ENABLE_WINOGRAD_NONFUSED TF_ENABLE_ZENDNN_OPTS
    TF_FORCE_GPU_ALLOW_GROWTH TF_FORCE_UNIFIED_MEMORY TF_FP16_CONV_USE_FP32_COMPUTE
    TF_FP16_MATMUL_USE_FP32_COMPUTE TF_FP16_RNN_USE_FP32_COMPUTE TF_GPU_ALLOCATOR
    TF_GPU_HOST_MEM_LIMIT_IN_MB TF_GPU_THREAD_COUNT TF_GPU_THREAD_MODE TF_MATMUL_AUTOTUNE_ENABLE
    TF_MATMUL_AUTOTUNE_MAX_ALGORITHMS TF_MIN_GPU_MULTIPROCESSOR_COUNT TF_NUM_INTEROP_THREADS
    TF_NUM_INTRAOP_THREADS TF_ONEDNN_ASSUME_FROZEN_WEIGHTS
    TF_ONEDNN_THREADPOOL_USE_CALLER_THREAD TF_OVERRIDE_GLOBAL_THREADPOOL TF_SET_ONEDNN_FPMATH_MODE
    TF_SYNC_ON_FINISH TF_USE_CUBLASLT TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT
    TF_USE_DEEP_CONV2D TF_USE_DEFAULT_CONV_ALGO TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS
    TF_USE_EIGEN_PARALLEL_FOR_IN_WORK_SHARDER TF_USE_LEGACY_KERAS TF_XLA_BRIDGE TF_XLA_FLAGS
    XDG_CACHE_HOME XLA_FLAGS
    """.split()
)
_SECRET = re.compile(r"--?\S*(token|secret|passw|api_?-?key|credential)", re.IGNORECASE)


def versions() -> dict[str, str | None]:
    """Return {"python": "3.11.7", ...}; None for what is not there, such as a driver."""
    build = tf.sysconfig.get_build_info()
    return {
        "python": platform.python_version(),
        "towers": towers.__version__,
        "tensorflow": tf.__version__,
        "tensorflow_source": str(tf.version.GIT_VERSION),
        "keras": keras.__version__,
        "numpy": np.__version__,
        "tensorboard": importlib.metadata.version("tensorboard"),
        "cuda_build": build.get("cuda_version"),
        "cudnn_build": build.get("cudnn_version"),
        "driver": nvml.driver_version(),
        "platform": platform.platform(),
    }


def machine() -> dict[str, Any]:
    """Return name, processor, cores and memory; `usable_cores` are those of this process."""
    return {
        "name": platform.node(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
    }


def processor() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return those of the variables that change what is computed which are set."""
    return {name: environ[name] for name in ENVIRONMENT if name in environ}


def command(argv: Sequence[str] | None = None) -> str:
    """Return a command line, by default that of this process, as a shell takes it.

    Of options that are named for a secret, as a program of one's own may have, the value is `***`.
    """
    argv = sys.orig_argv if argv is None else argv
    shown: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, _ = word.partition("=")
        if equals and _SECRET.match(name):
            word = f"{name}=***"
        elif _SECRET.match(before) and "=" not in before and not word.startswith("-"):
            word = "***"
        shown.append(word)
    return shlex.join(shown)
