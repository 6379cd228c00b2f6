/* libnvidia-ml.so.1 for a job with a part of a device: it reports the same memory as the driver, and only the job's own processes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "ledger.h"
#include "pages.h"

typedef struct nvmlDevice_st *nvmlDevice_t;

struct memory {
  unsigned long long total, free, used;
};

struct memory_v2 {
  unsigned int version;
  unsigned long long total, reserved, free, used;
};

struct process {
  unsigned int pid;
  unsigned long long used;
};

struct process_v2 {
  unsigned int pid;
  unsigned long long used;
  unsigned int gpu_instance, compute_instance;
};

enum { NVML_SUCCESS = 0, NVML_ERROR_NOT_SUPPORTED = 3, NVML_ERROR_LIBRARY_NOT_FOUND = 12, NVML_ERROR_FUNCTION_NOT_FOUND = 13 };

#define HOOK(name, parameters)                                       \
  __attribute__((visibility("default"))) int name parameters; \
  extern void *slot_##name;
#define EXPORT(name) extern void *slot_##name;
#include "nvml.def"
#include "nvml_exports.def"
#undef HOOK
#undef EXPORT

#define HOOK(name, parameters) {#name, &slot_##name},
#define EXPORT(name) {#name, &slot_##name},
static const struct {
  const char *name;
  void **slot;
} calls[] = {
#include "nvml.def"
#include "nvml_exports.def"
};
#undef HOOK
#undef EXPORT

#define REAL(name) ((__typeof__(&name))slot_##name)

static const _Atomic uint32_t open_gate;
const _Atomic uint32_t *guard_gate = &open_gate; /* no function here waits for it */

static int no_library(void) { return NVML_ERROR_LIBRARY_NOT_FOUND; }
static int no_such_call(void) { return NVML_ERROR_FUNCTION_NOT_FOUND; }
int guard_denied(void) { return NVML_ERROR_NOT_SUPPORTED; }
void guard_wait(void) {}

static void load(void) {
  void *library = pages_map() ? pages_open(guard_policy->nvml) : NULL;
  if (library != NULL && dlsym(library, "nvmlDeviceGetMemoryInfo") == (void *)&nvmlDeviceGetMemoryInfo) {
    pages_say(guard_policy->nvml, "is not NVIDIA's");
    library = NULL;
  }
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    void *real = library == NULL ? NULL : dlsym(library, calls[i].name);
    *calls[i].slot = real != NULL ? real : library == NULL ? (void *)&no_library : (void *)&no_such_call;
  }
}

void guard_load(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, load);
}

static int hex(char digit) {
  return digit >= '0' && digit <= '9' ? digit - '0' : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* Returns the index of a device in the policy, by its "GPU-01234567-..." UUID; -1 if it is not the job's. */
static int place_of(nvmlDevice_t device) {
  typedef int get_uuid(nvmlDevice_t, char *, unsigned int);
  extern void *slot_nvmlDeviceGetUUID;
  char name[96] = "";
  unsigned char uuid[16] = {0};
  unsigned digits = 0;
  if (guard_policy == NULL || ((get_uuid *)slot_nvmlDeviceGetUUID)(device, name, sizeof name) != NVML_SUCCESS) return -1;
  const char *at = strchr(name, '-');
  for (; at != NULL && *at != '\0' && digits < 32; at++)
    if (hex(*at) >= 0) {
      uuid[digits / 2] = (unsigned char)(uuid[digits / 2] << 4 | hex(*at));
      digits++;
    }
  for (uint32_t i = 0; i < guard_policy->devices && i < GUARD_DEVICES; i++)
    if (memcmp(guard_policy->allowances[i].uuid, uuid, sizeof uuid) == 0) return (int)i;
  return -1;
}

static void clamp(nvmlDevice_t device, unsigned long long *total, unsigned long long *free, unsigned long long *used) {
  int place = place_of(device);
  if (place < 0) return;
  const struct guard_allowance *allowance = &guard_policy->allowances[place];
  uint64_t limit = atomic_load(&allowance->memory_limit), held = ledger_used(guard_job, (unsigned)place) * GUARD_UNIT;
  if (limit >= *total) return; /* the job has the whole device */
  uint64_t whole = limit > held ? limit : held;
  if (*total > whole) *total = whole;
  *used = held < *total ? held : *total;
  if (*free > whole - held) *free = whole - held;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *out) {
  int result = REAL(nvmlDeviceGetMemoryInfo)(device, out);
  if (result == NVML_SUCCESS) clamp(device, &out->total, &out->free, &out->used);
  return result;
}

int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *out) {
  int result = REAL(nvmlDeviceGetMemoryInfo_v2)(device, out);
  if (result == NVML_SUCCESS) {
    clamp(device, &out->total, &out->free, &out->used);
    if (out->reserved > out->total - out->used) out->reserved = 0;
  }
  return result;
}

static bool is_ours(unsigned int pid) {
  if (guard_job == NULL) return false;
  for (unsigned i = 1; i < GUARD_SLOTS; i++)
    if (atomic_load(&guard_job->table[i].pid) == pid) return true;
  return false;
}

/* Reduces a list to the job's own processes; a count without a list is forwarded as an upper bound. */
#define PROCESSES(name, type)                                                       \
  int name(nvmlDevice_t device, unsigned int *count, struct type *list) {           \
    int result = REAL(name)(device, count, list);                                   \
    if (result != NVML_SUCCESS || list == NULL) return result;                      \
    unsigned int kept = 0;                                                          \
    for (unsigned int i = 0; i < *count; i++)                                       \
      if (is_ours(list[i].pid)) list[kept++] = list[i];                             \
    *count = kept;                                                                  \
    return result;                                                                  \
  }
PROCESSES(nvmlDeviceGetComputeRunningProcesses, process)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, process_v2)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, process_v2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, process)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, process_v2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, process_v2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, process)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, process_v2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, process_v2)
