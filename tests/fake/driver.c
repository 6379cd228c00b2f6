#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct world *driver_world;
struct process *driver_self;
pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;

static bool forked; /* from a process that had called cuInit: nothing works here any more */
static _Atomic uint64_t uncounted[CALLS];
static _Atomic uint64_t *counters = uncounted;

/* FAKE_FAIL="cuMemAlloc_v2:3=2,cuLaunchKernel:1=719": the third and the first such call of the process fail, so. */
static struct {
  enum call call;
  _Atomic int64_t left;
  CUresult error;
} faults[32];
static size_t fault_count;

#define HOOK(name, parameters) #name,
#define COPY(name, ...) #name,
#define PAUSE(name, ...) #name,
#define DENY(name, error) #name,
#define EXPORT(name) #name,
static const char *const names[] = {
#include "hooks.def"
#include "exports.def"
};
#undef HOOK
#undef COPY
#undef PAUSE
#undef DENY
#undef EXPORT

static void arm(const char *text) {
  while (*text != 0 && fault_count < sizeof faults / sizeof *faults) {
    size_t length = strcspn(text, ":");
    for (int i = 0; i < CALLS; i++)
      if (strlen(names[i]) == length && strncmp(names[i], text, length) == 0) faults[fault_count].call = (enum call)i;
    char *rest;
    faults[fault_count].left = strtoll(text + length + (text[length] != 0), &rest, 10);
    faults[fault_count++].error = (CUresult)strtol(rest + (*rest != 0), &rest, 10);
    text = rest + (*rest != 0);
  }
}

static void before_fork(void) { pthread_mutex_lock(&driver_lock); }

static void after_fork(void) { pthread_mutex_unlock(&driver_lock); }

static void in_child(void) {
  forked = driver_self != NULL;
  after_fork();
}

__attribute__((constructor)) static void load(void) {
  const char *path = getenv("FAKE_GPU_WORLD"), *fail = getenv("FAKE_FAIL");
  if (path != NULL && (driver_world = world_open(path)) != NULL) counters = driver_world->calls;
  if (fail != NULL) arm(fail);
  pthread_atfork(before_fork, after_fork, in_child);
}

int driver_hold(void) { return pthread_mutex_lock(&driver_lock); }

void driver_release(const int *held) {
  (void)held;
  pthread_mutex_unlock(&driver_lock);
}

CUresult driver_count(enum call call) {
  atomic_fetch_add_explicit(&counters[call], 1, memory_order_relaxed);
  for (size_t i = 0; i < fault_count; i++)
    if (faults[i].call == call && --faults[i].left == 0) return faults[i].error;
  return CUDA_SUCCESS;
}

CUresult driver_enter(enum call call) {
  TRY(driver_count(call));
  REFUSE_IF(driver_self == NULL || forked, CUDA_ERROR_NOT_INITIALIZED);
  for (uint32_t state; (state = driver_self->state) != PROCESS_RUNNING;) world_sleep(&driver_self->state, state, WORLD_NEVER);
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) {
  TRY(driver_count(CALL_cuInit));
  REFUSE_IF(flags != 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(forked, CUDA_ERROR_NOT_INITIALIZED);
  LOCKED;
  REFUSE_IF(driver_world == NULL || driver_world->config.devices == 0, CUDA_ERROR_NO_DEVICE);
  if (driver_self == NULL) driver_self = world_join(driver_world);
  return driver_self == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  TRY(driver_count(CALL_cuDriverGetVersion));
  REFUSE_IF(version == NULL, CUDA_ERROR_INVALID_VALUE);
  *version = driver_world != NULL ? (int)driver_world->config.driver_version : 13000;
  return CUDA_SUCCESS;
}

static CUresult internal(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* Programs find the driver's internal calls in such tables; these three are what cudart asks for. Ours have a size, as the real
 * ones do, and nothing behind their entries. */
CUresult cuGetExportTable(const void **table, const CUuuid *id) {
  static const unsigned char ids[][4] = {{0xf8, 0xcf, 0xf9, 0x51}, {0x6b, 0xd5, 0xfb, 0x6c}, {0xa0, 0x94, 0x79, 0x8c}};
  static const struct {
    size_t size;
    CUresult (*calls[7])(void);
  } tables[] = {
      {sizeof *tables, {internal, internal, internal, internal, internal, internal, internal}},
      {sizeof *tables, {internal, internal, internal, internal, internal, internal, internal}},
      {sizeof *tables, {internal, internal, internal, internal, internal, internal, internal}},
  };
  TRY(driver_count(CALL_cuGetExportTable));
  REFUSE_IF(table == NULL || id == NULL, CUDA_ERROR_INVALID_VALUE);
  *table = NULL;
  for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
    if (memcmp(id->bytes, ids[i], sizeof *ids) == 0) *table = &tables[i];
  return *table != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
