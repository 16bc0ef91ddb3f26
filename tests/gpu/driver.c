/* NVIDIA's driver library for the GPUs of device.cc: what towers asks through nvidia-ml-py.

   Built with -DOLD it is a driver from before R510, which lacks a function that nvidia-ml-py calls. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { char legacy_id[16]; unsigned domain, bus, device, ids[2]; char id[32]; } Pci;
typedef struct { unsigned gpu, memory; } Utilization;

enum { OK, NOT_SUPPORTED = 3 };

static unsigned long long number(const char* name, unsigned long long otherwise) {
  const char* value = getenv(name);
  return value ? strtoull(value, NULL, 10) : otherwise;
}

static unsigned long long total(void) { return number("TOWERS_TEST_GPU_MIB", 1024) << 20; }

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char* nvmlErrorString(int error) { return "not supported"; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "555.42.02");
  return OK;
}

/* A handle is the number of the GPU, from 1. */
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = number("TOWERS_TEST_GPUS", 2);
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, uintptr_t* gpu) {
  *gpu = index + 1;
  return OK;
}
int nvmlDeviceGetName(uintptr_t gpu, char* text, unsigned size) {
  snprintf(text, size, "GPU of host memory");
  return OK;
}
int nvmlDeviceGetUUID(uintptr_t gpu, char* text, unsigned size) {
  snprintf(text, size, "GPU-%08u-0000-4000-8000-000000000000", (unsigned)gpu);
  return OK;
}
int nvmlDeviceGetPciInfo_v3(uintptr_t gpu, Pci* pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = gpu;
  snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", (unsigned)gpu);
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(uintptr_t gpu, int* major, int* minor) {
  *major = 8, *minor = 0;
  return OK;
}
int nvmlDeviceGetMemoryInfo(uintptr_t gpu, Memory* memory) {
  *memory = (Memory){total(), total(), 0};
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(uintptr_t gpu, MemoryV2* memory) {
  *memory = (MemoryV2){memory->version, total(), 0, total(), 0};
  return OK;
}
int nvmlDeviceGetMigMode(uintptr_t gpu, unsigned* now, unsigned* later) { return NOT_SUPPORTED; }
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(uintptr_t gpu, unsigned* count, void* processes) {
  *count = 0;
  return OK;
}
#endif

/* What gpu_health.py samples. */
int nvmlDeviceGetUtilizationRates(uintptr_t gpu, Utilization* percent) {
  *percent = (Utilization){50, 20};
  return OK;
}
int nvmlDeviceGetPowerUsage(uintptr_t gpu, unsigned* milliwatts) { return *milliwatts = 100000, OK; }
int nvmlDeviceGetTemperature(uintptr_t gpu, int sensor, unsigned* celsius) { return *celsius = 60, OK; }
int nvmlDeviceGetClockInfo(uintptr_t gpu, int clock, unsigned* mhz) { return *mhz = 1410, OK; }
