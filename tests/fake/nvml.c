/* NVIDIA's management library, as far as it tells of memory, processes and utilisation. */
#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
} nvmlReturn_t;

typedef struct device *nvmlDevice_t;

#define REFUSE_IF(refused, error) \
  do {                            \
    if (refused) return (error);  \
  } while (0)
#define NEED_DEVICE(device, out)                                 \
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);               \
  REFUSE_IF(number_of(device) < 0, NVML_ERROR_INVALID_ARGUMENT); \
  REFUSE_IF((out) == NULL, NVML_ERROR_INVALID_ARGUMENT)
#define VERSIONED(type, number) ((uint32_t)sizeof(type) | (uint32_t)(number) << 24)

static struct world *world;
static _Atomic int users;

nvmlReturn_t nvmlInit_v2(void) {
  const char *path = getenv("FAKE_GPU_WORLD");
  if (world == NULL && path != NULL) world = world_open(path);
  REFUSE_IF(world == NULL, NVML_ERROR_DRIVER_NOT_LOADED);
  users++;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  (void)flags;
  return nvmlInit_v2();
}

nvmlReturn_t nvmlShutdown(void) {
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
  users--;
  return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t error) {
  switch (error) {
    case NVML_SUCCESS:
      return "The operation was successful";
    case NVML_ERROR_UNINITIALIZED:
      return "NVML was not first initialized with nvmlInit()";
    case NVML_ERROR_INVALID_ARGUMENT:
      return "A supplied argument is invalid";
    case NVML_ERROR_NOT_SUPPORTED:
      return "The requested operation is not available on target device";
    case NVML_ERROR_NOT_FOUND:
      return "A query to find an object was unsuccessful";
    case NVML_ERROR_INSUFFICIENT_SIZE:
      return "An input argument is not large enough";
    case NVML_ERROR_DRIVER_NOT_LOADED:
      return "NVIDIA driver is not loaded";
    default:
      return "An unknown error occurred";
  }
}

/* -1: none of ours */
static int number_of(nvmlDevice_t device) {
  for (uint32_t i = 0; i < world->config.devices; i++)
    if (device == &world->devices[i]) return (int)i;
  return -1;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int length) {
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
  REFUSE_IF(text == NULL, NVML_ERROR_INVALID_ARGUMENT);
  uint32_t version = world->config.driver_version;
  /* Releases since CUDA 13.0 begin at 580. */
  int written = snprintf(text, length, "%u.00", version >= 13000 ? 580 + (version - 13000) / 2 : 525 + (version - 12000) / 2);
  return written < (int)length ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
  REFUSE_IF(version == NULL, NVML_ERROR_INVALID_ARGUMENT);
  *version = (int)world->config.driver_version;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
  REFUSE_IF(count == NULL, NVML_ERROR_INVALID_ARGUMENT);
  *count = world->config.devices;
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *out) {
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
  REFUSE_IF(out == NULL || index >= world->config.devices, NVML_ERROR_INVALID_ARGUMENT);
  *out = &world->devices[index];
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *out) {
  return nvmlDeviceGetHandleByIndex_v2(index, out);
}

static void write_uuid(const struct device *device, char text[48]) {
  char *at = text + sprintf(text, "GPU-");
  for (int i = 0; i < 16; i++) at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", device->uuid[i]);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out) {
  REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
  REFUSE_IF(uuid == NULL || out == NULL, NVML_ERROR_INVALID_ARGUMENT);
  for (uint32_t i = 0; i < world->config.devices; i++) {
    char text[48];
    write_uuid(&world->devices[i], text);
    if (strcmp(text, uuid) != 0) continue;
    *out = &world->devices[i];
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned int length) {
  char text[48];
  NEED_DEVICE(device, out);
  write_uuid(device, text);
  REFUSE_IF(strlen(text) >= length, NVML_ERROR_INSUFFICIENT_SIZE);
  strcpy(out, text);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned int length) {
  NEED_DEVICE(device, out);
  REFUSE_IF(strlen(device->name) >= length, NVML_ERROR_INSUFFICIENT_SIZE);
  strcpy(out, device->name);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *out) {
  NEED_DEVICE(device, out);
  *out = (unsigned int)number_of(device);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *out) { return nvmlDeviceGetIndex(device, out); }

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  NEED_DEVICE(device, major);
  REFUSE_IF(minor == NULL, NVML_ERROR_INVALID_ARGUMENT);
  *major = (int)world->config.capability / 10;
  *minor = (int)world->config.capability % 10;
  return NVML_SUCCESS;
}

/* Memory. */

static uint64_t used(const struct device *device) {
  world_lock(world);
  world_reap(world);
  uint64_t bytes = device->used;
  world_unlock(world);
  return bytes;
}

struct memory {
  unsigned long long total, free, used;
};

struct memory_v2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;
};

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *out) {
  NEED_DEVICE(device, out);
  uint64_t bytes = used(device);
  *out = (struct memory){.total = device->memory, .free = device->memory - bytes, .used = bytes};
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *out) {
  NEED_DEVICE(device, out);
  REFUSE_IF(out->version != VERSIONED(struct memory_v2, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  uint64_t bytes = used(device);
  out->total = device->memory;
  out->reserved = 0;
  out->free = device->memory - bytes;
  out->used = bytes;
  return NVML_SUCCESS;
}

/* Processes. */

struct running_v1 {
  unsigned int pid;
  unsigned long long used;
};

struct running_v2 {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;
};

/* `later`: with the larger records. */
static nvmlReturn_t running(nvmlDevice_t device, unsigned int *count, void *out, bool later) {
  NEED_DEVICE(device, count);
  unsigned int found = 0, room = out != NULL ? *count : 0;
  int d = number_of(device);
  world_lock(world);
  world_reap(world);
  for (uint32_t i = 0; i < world->joined; i++) {
    const struct process *process = &world->processes[i];
    if (!process->alive || process->memory[d] == 0) continue;
    if (found < room && later)
      ((struct running_v2 *)out)[found] = (struct running_v2){(unsigned int)world_pid(world, process), process->memory[d], ~0u, ~0u};
    else if (found < room)
      ((struct running_v1 *)out)[found] = (struct running_v1){(unsigned int)world_pid(world, process), process->memory[d]};
    found++;
  }
  world_unlock(world);
  *count = found;
  return found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, void *out) {
  return running(device, count, out, false);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, void *out) {
  return running(device, count, out, true);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, void *out) {
  return running(device, count, out, true);
}

/* Nobody draws here, and there is no MPS. */
#define NO_PROCESSES(name)                                                 \
  nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, void *out) { \
    (void)out;                                                             \
    NEED_DEVICE(device, count);                                            \
    *count = 0;                                                            \
    return NVML_SUCCESS;                                                   \
  }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* Utilisation. */

struct utilisation {
  unsigned int gpu, memory;
};

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilisation *out) {
  NEED_DEVICE(device, out);
  world_lock(world);
  *out = (struct utilisation){.gpu = device->percent};
  world_unlock(world);
  return NVML_SUCCESS;
}

enum { HIGHEST_MHZ = 1980, CLOCKS = 4 }; /* as an H200's */

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *out) {
  NEED_DEVICE(device, out);
  REFUSE_IF(type < 0 || type >= CLOCKS, NVML_ERROR_INVALID_ARGUMENT);
  world_lock(world);
  *out = (unsigned int)((uint64_t)HIGHEST_MHZ * device->clock_ppm / WORLD_WHOLE);
  world_unlock(world);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned int *out) {
  NEED_DEVICE(device, out);
  REFUSE_IF(type < 0 || type >= CLOCKS, NVML_ERROR_INVALID_ARGUMENT);
  *out = HIGHEST_MHZ;
  return NVML_SUCCESS;
}

static nvmlReturn_t lock_clock(nvmlDevice_t device, uint32_t ppm) {
  NEED_DEVICE(device, device);
  world_lock(world);
  device->locked_ppm = ppm;
  if (ppm > 0) device->clock_ppm = ppm;
  world_unlock(world);
  return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned int least, unsigned int most) {
  REFUSE_IF(least == 0 || least > most || most > HIGHEST_MHZ, NVML_ERROR_INVALID_ARGUMENT);
  return lock_clock(device, (uint32_t)((uint64_t)most * WORLD_WHOLE / HIGHEST_MHZ));
}

nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device) { return lock_clock(device, 0); }

/* NVML's times are microseconds of the calendar; a world's are those of a clock that began elsewhere. */
static int64_t calendar_us(int64_t ns) {
  struct timespec real;
  if (world->config.virtual_ns != 0) return ns / 1000;
  clock_gettime(CLOCK_REALTIME, &real);
  return (real.tv_sec * 1000000000ll + real.tv_nsec - world_clock() + ns) / 1000;
}

/* The newest sample of each process, if it is newer than `since_us`. The first are the latest. */
static unsigned int newest(const struct device *device, int64_t since_us, struct sample *out) {
  unsigned int count = 0;
  world_lock(world);
  for (uint64_t i = 0; i < device->samples && i < WORLD_SAMPLES; i++) {
    const struct sample *sample = &device->ring[(device->samples - 1 - i) % WORLD_SAMPLES];
    bool seen = calendar_us(sample->ns) <= since_us;
    for (unsigned int j = 0; j < count; j++) seen |= out[j].process == sample->process;
    if (!seen) out[count++] = *sample;
  }
  for (unsigned int i = 0; i < count; i++) out[i].pid = world_pid(world, &world->processes[out[i].process]);
  world_unlock(world);
  return count;
}

struct process_sample {
  unsigned int pid;
  unsigned long long at_us;
  unsigned int sm, memory, encoder, decoder;
};

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, struct process_sample *out, unsigned int *count,
                                             unsigned long long since_us) {
  struct sample found[WORLD_SAMPLES];
  NEED_DEVICE(device, count);
  unsigned int room = *count;
  *count = newest(device, (int64_t)since_us, found);
  REFUSE_IF(*count == 0 && out != NULL, NVML_ERROR_NOT_FOUND);
  REFUSE_IF(out == NULL || room < *count, NVML_ERROR_INSUFFICIENT_SIZE);
  for (unsigned int i = 0; i < *count; i++)
    out[i] = (struct process_sample){
        .pid = (unsigned int)found[i].pid, .at_us = (unsigned long long)calendar_us(found[i].ns), .sm = found[i].percent};
  return NVML_SUCCESS;
}

struct process_info {
  unsigned long long at_us;
  unsigned int pid, sm, memory, encoder, decoder, jpeg, optical_flow;
};

struct processes_info {
  unsigned int version, count;
  unsigned long long since_us;
  struct process_info *out;
};

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, struct processes_info *info) {
  struct sample found[WORLD_SAMPLES];
  NEED_DEVICE(device, info);
  REFUSE_IF(info->version != VERSIONED(struct processes_info, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  unsigned int room = info->out != NULL ? info->count : 0;
  info->count = newest(device, (int64_t)info->since_us, found);
  REFUSE_IF(info->count == 0 && info->out != NULL, NVML_ERROR_NOT_FOUND);
  REFUSE_IF(info->out == NULL || room < info->count, NVML_ERROR_INSUFFICIENT_SIZE);
  for (unsigned int i = 0; i < info->count; i++)
    info->out[i] = (struct process_info){
        .at_us = (unsigned long long)calendar_us(found[i].ns), .pid = (unsigned int)found[i].pid, .sm = found[i].percent};
  return NVML_SUCCESS;
}
