#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "guard.h"
#include "ledger.h"

static const _Atomic uint32_t open_gate;
const _Atomic uint32_t *guard_gate = &open_gate;

static _Atomic int own_slot = -1;
static pthread_mutex_t slot_mutex = PTHREAD_MUTEX_INITIALIZER;

/* --- functions */

struct call {
  const char *name;
  void **slot;
  void *entry; /* the guard's; NULL if the program gets the driver's own */
  void *real;
  CUresult denied;
};

#define HOOK(name, parameters)
#define COPY(name, ...)
#define PAUSE(name, ...)
#define DENY(name, error)   \
  extern void *slot_##name; \
  void name(void);
#define EXPORT(name) extern void *slot_##name;
#include "exports.def"
#include "hooks.def"
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY
#undef EXPORT

#define HOOK(name, parameters) {#name, &slot_##name, (void *)&name, NULL, 0},
#define COPY(name, ...) HOOK(name, )
#define PAUSE(name, ...) HOOK(name, )
#define DENY(name, error) {#name, &slot_##name, (void *)&name, NULL, error},
#define EXPORT(name) {#name, &slot_##name, NULL, NULL, 0},
static struct call calls[] = {
#include "exports.def"
#include "hooks.def"
};
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY
#undef EXPORT
#define CALLS (sizeof calls / sizeof *calls)

static CUresult no_driver(void) { return CUDA_ERROR_STUB_LIBRARY; }
static CUresult no_such_call(void) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult guard_denied(void **slot) {
  guard_load();
  for (size_t i = 0; i < CALLS; i++)
    if (calls[i].slot == slot) return calls[i].denied;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static int by_address(const void *a, const void *b) {
  uintptr_t left = (uintptr_t)((const struct call *)a)->real, right = (uintptr_t)((const struct call *)b)->real;
  return (left > right) - (left < right);
}

static const struct call *call_at(void *address) {
  struct call key = {.real = address};
  return bsearch(&key, calls, CALLS, sizeof *calls, by_address);
}

/* --- loading */

static bool is_driver(void *library) {
  return dlsym(library, "cuInit") != NULL && dlsym(library, "cuMemAlloc_v2") != (void *)&cuMemAlloc_v2;
}

/* The newer driver library of an image for forward compatibility, if its directory, /usr/local/cuda/compat or one below it, is where this
 * program would find it: NVIDIA's images put it into LD_LIBRARY_PATH where it fits the machine (CUDA Compatibility, "Forward
 * Compatibility"). A program could open it in any case. */
static void *open_compatible(void) {
  const char *path = getenv("LD_LIBRARY_PATH");
  for (size_t length; path != NULL && *path != 0; path += length + (path[length] != 0)) {
    char name[GUARD_PATH + 32];
    length = strcspn(path, ":");
    if (length == 0 || length >= GUARD_PATH) continue;
    memcpy(name, path, length);
    name[length] = 0;
    if (strstr(name, "/cuda/compat") == NULL) continue;
    strcat(name, "/libcuda.so.1");
    void *library = access(name, R_OK) == 0 ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library != NULL && is_driver(library)) return library;
  }
  return NULL;
}

static void *open_driver(void) {
  void *driver = open_compatible();
  if (driver == NULL) driver = pages_open(guard_policy->driver);
  if (driver == NULL || is_driver(driver)) return driver;
  pages_say(guard_policy->driver, "is not the driver");
  return NULL;
}

static void forked(void) {
  atomic_store(&own_slot, -1);
  (void)pthread_mutex_init(&slot_mutex, NULL);
  ledger_forked();
  memory_forked();
  meter_forked();
}

/* A driver's function with two names is hooked under both. */
static void also_named(const struct call *one, struct call *other) {
  if (one->real != NULL && one->real == other->real && other->entry == NULL) other->entry = one->entry;
}

static void load(void) {
  void *driver = pages_map() ? open_driver() : NULL;
  for (size_t i = 0; i < CALLS; i++) {
    calls[i].real = driver == NULL ? NULL : dlsym(driver, calls[i].name);
    *calls[i].slot = calls[i].real;
    if (calls[i].real == NULL) *calls[i].slot = driver == NULL ? (void *)&no_driver : (void *)&no_such_call;
  }
  if (guard_policy != NULL) guard_gate = &guard_policy->gate;
  qsort(calls, CALLS, sizeof *calls, by_address);
  for (size_t i = 1; i < CALLS; i++) also_named(&calls[i - 1], &calls[i]);
  for (size_t i = CALLS; i-- > 1;) also_named(&calls[i], &calls[i - 1]);
  (void)pthread_atfork(NULL, NULL, forked);
}

void guard_load(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, load);
}

/* --- lookup of the driver's functions */

static bool looks_like_ours(const char *symbol) {
  static const char *const families[] = {"cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuMemCreate",  "cuMemcpy",      "cuMemset",
                                         "cuLaunch",   "cuGraphLaunch", "cuArrayCreate", "cuArray3DCreate",
                                         "cuMipmappedArrayCreate", "cuStreamBegin", "cuCheckpointProcess"};
  for (size_t i = 0; i < sizeof families / sizeof *families; i++)
    if (strncmp(symbol, families[i], strlen(families[i])) == 0) return true;
  return false;
}

/* Records a call unknown to the guard that may allocate memory or launch work. */
static void audit(const char *symbol) {
  if (guard_job == NULL) return;
  uint32_t count = atomic_load(&guard_job->audits);
  for (uint32_t i = 0; i < count && i < GUARD_AUDITS; i++)
    if (strncmp(guard_job->audit[i], symbol, GUARD_NAME - 1) == 0) return;
  uint32_t place = atomic_fetch_add(&guard_job->audits, 1);
  if (place < GUARD_AUDITS) strncpy(guard_job->audit[place], symbol, GUARD_NAME - 1);
}

/* Forms of calls that were added in another version than CUDA 3.2, with which most of the second ones came. NVIDIA's cudaTypedefs.h lists
 * them all. */
static const struct {
  const char *name;
  int since;
} forms[] = {
    {"cuCtxCreate_v3", 11040},          {"cuCtxCreate_v4", 12050},
    {"cuCtxDestroy_v2", 4000},          {"cuCtxPopCurrent_v2", 4000},
    {"cuCtxPushCurrent_v2", 4000},      {"cuCtxSynchronize_v2", 13000},
    {"cuDevicePrimaryCtxRelease_v2", 11000}, {"cuDevicePrimaryCtxReset_v2", 11000},
    {"cuGetProcAddress_v2", 12000},     {"cuGraphAddNode_v2", 12030},
    {"cuGraphAddNode_v3", 13040},       {"cuGraphInstantiate_v2", 11000},
    {"cuIpcOpenMemHandle_v2", 11000},   {"cuLaunchHostFunc_v2", 13010},
    {"cuMemHostRegister_v2", 6050},     {"cuMemPrefetchAsync_v2", 12020},
    {"cuMemcpy3DBatchAsync_v2", 13000}, {"cuMemcpyBatchAsync_v2", 13000},
    {"cuStreamBatchMemOp_v2", 11070},   {"cuStreamBeginCapture_v2", 10010},
    {"cuStreamDestroy_v2", 4000},       {"cuStreamWaitValue32_v2", 11070},
    {"cuStreamWaitValue64_v2", 11070},
};
#define KNOWN_VERSION 13050 /* of CUDA, to which these are complete */
#define PER_THREAD 2        /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */

/* Returns since when a call is the form of `symbol` with this default stream; -1 if it is none. */
static int form_since(const char *name, const char *symbol, bool per_thread) {
  size_t length = strlen(symbol);
  if (strncmp(name, symbol, length) != 0) return -1;
  const char *rest = name + length, *end = strstr(rest, "_pt");
  size_t number = end == NULL ? strlen(rest) : (size_t)(end - rest);
  if ((end != NULL) != per_thread || (number != 0 && (number != 3 || strncmp(rest, "_v", 2) != 0))) return -1;
  for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
    if (strncmp(forms[i].name, name, length + number) == 0 && forms[i].name[length + number] == 0) return forms[i].since;
  return number == 0 ? 0 : 3020;
}

/* Finds the call that a name means, for a driver that gives addresses which it does not export. Forms of later versions are not known. */
static const struct call *call_named(const char *symbol, int version, bool per_thread) {
  const struct call *found = NULL;
  for (size_t i = 0; i < CALLS && version <= KNOWN_VERSION; i++) {
    int since = form_since(calls[i].name, symbol, per_thread);
    if (since < 0 || since > version || calls[i].real == NULL) continue;
    if (found == NULL || since > form_since(found->name, symbol, per_thread)) found = &calls[i];
  }
  return found == NULL && per_thread ? call_named(symbol, version, false) : found;
}

/* Returns the driver's answer for `symbol`, or the guard's hook in its place. */
static CUresult swap(CUresult result, const char *symbol, int version, cuuint64_t flags, void **address) {
  if (result != CUDA_SUCCESS || address == NULL || *address == NULL) return result;
  guard_load(); /* fills the table */
  const struct call *call = call_at(*address);
  if (call == NULL && symbol != NULL) call = call_named(symbol, version, (flags & PER_THREAD) != 0);
  if (call == NULL && symbol != NULL && looks_like_ours(symbol)) audit(symbol);
  if (call != NULL && call->entry != NULL) *address = call->entry;
  return result;
}

CUresult cuGetProcAddress(const char *symbol, void **address, int version, cuuint64_t flags) {
  return swap(REAL(cuGetProcAddress)(symbol, address, version, flags), symbol, version, flags, address);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  return swap(REAL(cuGetProcAddress_v2)(symbol, address, version, flags, status), symbol, version, flags, address);
}

/* --- this process in the job */

static _Atomic int numbers[GUARD_DEVICES];

int guard_slot(void) {
  int slot = atomic_load_explicit(&own_slot, memory_order_acquire);
  if (slot >= 0 || guard_job == NULL) return slot;
  (void)pthread_mutex_lock(&slot_mutex);
  slot = atomic_load(&own_slot);
  if (slot < 0) {
    slot = ledger_claim(guard_job, guard_job_file, (unsigned)getpid());
    atomic_store_explicit(&own_slot, slot, memory_order_release);
  }
  (void)pthread_mutex_unlock(&slot_mutex);
  return slot;
}

void guard_sweep(void) { (void)ledger_sweep(guard_job, guard_job_file, atomic_load(&own_slot)); }

CUresult guard_place(CUdevice device, int *place) {
  static _Atomic int known[64]; /* 0: unknown; else the place + 2, so 1 means none */
  *place = -1;
  if (guard_policy == NULL || device < 0) return CUDA_ERROR_INVALID_DEVICE;
  if (device < 64 && atomic_load(&known[device]) != 0) {
    *place = atomic_load(&known[device]) - 2;
    return *place >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
  }
  CUuuid uuid;
  CUresult result = DRIVER(cuDeviceGetUuid_v2)(&uuid, device);
  if (result != CUDA_SUCCESS) result = DRIVER(cuDeviceGetUuid)(&uuid, device);
  if (result != CUDA_SUCCESS) return result;
  for (uint32_t i = 0; i < guard_policy->devices && i < GUARD_DEVICES; i++)
    if (memcmp(guard_policy->allowances[i].uuid, uuid.bytes, sizeof uuid.bytes) == 0) *place = (int)i;
  if (*place >= 0) atomic_store(&numbers[*place], device);
  if (device < 64) atomic_store(&known[device], *place + 2);
  return *place >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
}

int guard_device(CUdevice device) {
  int place;
  (void)guard_place(device, &place);
  return place;
}

CUdevice guard_number(int place) { return atomic_load(&numbers[place]); }

bool guard_step_into(CUstream stream) {
  CUcontext own = NULL, current = NULL;
  if (stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) return false;
  if (DRIVER(cuStreamGetCtx)(stream, &own) != CUDA_SUCCESS || DRIVER(cuCtxGetCurrent)(&current) != CUDA_SUCCESS) return false;
  return own != current && REAL(cuCtxPushCurrent_v2)(own) == CUDA_SUCCESS;
}

void guard_step_out(bool stepped) {
  CUcontext own;
  if (stepped) (void)REAL(cuCtxPopCurrent_v2)(&own);
}

CUresult guard_current(int *device) {
  CUdevice current;
  CUresult result = DRIVER(cuCtxGetDevice)(&current);
  if (result != CUDA_SUCCESS) return result;
  return guard_place(current, device);
}
