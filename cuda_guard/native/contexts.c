/* Contexts: each uses memory, and its allocations end with it. */
#include "memory.h"

static struct table contexts = TABLE_EMPTY; /* context, or PRIMARY of a device -> units; count: retains */
static pthread_mutex_t context_mutex = PTHREAD_MUTEX_INITIALIZER;

static int64_t context_units(int device) { return units_for(atomic_load(&guard_policy->allowances[device].context_bytes)); }

#define PRIMARY(device) ((uint64_t)(device) + 1) /* key of a device's primary context, which is reference-counted */

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice number) {
  guard_load();
  if (guard_policy == NULL || out == NULL || number < 0) return REAL(cuDevicePrimaryCtxRetain)(out, number);
  int device;
  CUresult result = guard_place(number, &device);
  if (result != CUDA_SUCCESS) return result;
  (void)pthread_mutex_lock(&context_mutex);
  result = CUDA_ERROR_OUT_OF_MEMORY;
  bool known = table_count(&contexts, PRIMARY(number), 1).key != 0;
  int64_t units = known ? 0 : context_units(device);
  if (memory_reserve(device, units)) {
    result = REAL(cuDevicePrimaryCtxRetain)(out, number);
    if (result == CUDA_SUCCESS && !known) {
      struct entry entry = {.key = PRIMARY(number), .units = units, .link = id(*out), .device = device, .count = 1};
      (void)table_put(&contexts, entry);
    }
    if (result != CUDA_SUCCESS) memory_give_back(device, units);
  }
  if (result != CUDA_SUCCESS && known) (void)table_count(&contexts, PRIMARY(number), -1);
  (void)pthread_mutex_unlock(&context_mutex);
  return result;
}

typedef CUresult device_call(CUdevice number);

static CUresult release(device_call *real, CUdevice number) {
  (void)pthread_mutex_lock(&context_mutex);
  struct entry entry = table_get(&contexts, PRIMARY(number));
  if (entry.key != 0 && entry.count == 1) meter_context_ends((CUcontext)(uintptr_t)entry.link);
  CUresult result = real(number);
  if (result == CUDA_SUCCESS && entry.key != 0 && table_count(&contexts, PRIMARY(number), -1).count == 0) {
    memory_context_gone(entry.link);
    memory_drop(table_take(&contexts, PRIMARY(number)));
  }
  (void)pthread_mutex_unlock(&context_mutex);
  return result;
}

static CUresult reset(device_call *real, CUdevice number) {
  struct entry entry = table_get(&contexts, PRIMARY(number));
  if (entry.key != 0) meter_context_ends((CUcontext)(uintptr_t)entry.link);
  CUresult result = real(number);
  if (result == CUDA_SUCCESS && entry.key != 0) memory_context_gone(entry.link); /* its next use creates it again, so it stays charged */
  return result;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice number) { return release(REAL(cuDevicePrimaryCtxRelease), number); }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice number) { return release(REAL(cuDevicePrimaryCtxRelease_v2), number); }
CUresult cuDevicePrimaryCtxReset(CUdevice number) { return reset(REAL(cuDevicePrimaryCtxReset), number); }
CUresult cuDevicePrimaryCtxReset_v2(CUdevice number) { return reset(REAL(cuDevicePrimaryCtxReset_v2), number); }

/* Charges for a context to be made. One without a place to charge is the driver's to refuse, or there is no policy. */
static CUresult before_context(struct charge *charge, const CUcontext *out, CUdevice number) {
  guard_load();
  *charge = (struct charge){.place = -1};
  if (guard_policy == NULL || out == NULL || number < 0) return CUDA_SUCCESS;
  CUresult result = guard_place(number, &charge->place);
  if (result != CUDA_SUCCESS) return result;
  meter_moved();
  charge->units = context_units(charge->place);
  return charge_make(*charge);
}

static void destroy_context(uint64_t key) { (void)REAL(cuCtxDestroy_v2)((CUcontext)(uintptr_t)key); }

static CUresult after_context(struct charge charge, const CUcontext *out, CUresult result) {
  return charge.place < 0 ? result : charge_keep(&contexts, id(*out), charge, result, destroy_context);
}

CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) {
  struct charge charge;
  CUresult result = before_context(&charge, out, device);
  return result != CUDA_SUCCESS ? result : after_context(charge, out, REAL(cuCtxCreate)(out, flags, device));
}

CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) {
  struct charge charge;
  CUresult result = before_context(&charge, out, device);
  return result != CUDA_SUCCESS ? result : after_context(charge, out, REAL(cuCtxCreate_v2)(out, flags, device));
}

CUresult cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device) {
  struct charge charge;
  CUresult result = before_context(&charge, out, device);
  return result != CUDA_SUCCESS ? result : after_context(charge, out, REAL(cuCtxCreate_v3)(out, affinity, count, flags, device));
}

CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
  struct charge charge;
  CUresult result = before_context(&charge, out, device);
  return result != CUDA_SUCCESS ? result : after_context(charge, out, REAL(cuCtxCreate_v4)(out, params, flags, device));
}

CUresult cuCtxAttach(CUcontext *out, unsigned int flags) {
  CUresult result = REAL(cuCtxAttach)(out, flags);
  if (result == CUDA_SUCCESS) (void)table_count(&contexts, id(*out), 1);
  return result;
}

static CUresult destroy(CUresult (*real)(CUcontext), CUcontext context) {
  meter_context_ends(context);
  struct entry entry = table_take(&contexts, id(context));
  CUresult result = real(context);
  if (result == CUDA_SUCCESS && entry.key != 0) {
    memory_context_gone(entry.key);
    memory_drop(entry);
  } else if (entry.key != 0) {
    (void)table_put(&contexts, entry);
  }
  return result;
}

/* The last one ends it. */
CUresult cuCtxDetach(CUcontext context) {
  struct entry entry = table_get(&contexts, id(context));
  if (entry.key != 0 && entry.count == 1) return destroy(REAL(cuCtxDetach), context);
  CUresult result = REAL(cuCtxDetach)(context);
  if (result == CUDA_SUCCESS) (void)table_count(&contexts, id(context), -1);
  return result;
}

CUresult cuCtxDestroy(CUcontext context) { return destroy(REAL(cuCtxDestroy), context); }
CUresult cuCtxDestroy_v2(CUcontext context) { return destroy(REAL(cuCtxDestroy_v2), context); }

/* A part of a device's processors has a context for its streams; its allocations belong to the primary context. */
CUresult cuGreenCtxDestroy(CUgreenCtx green) {
  CUcontext context;
  if (DRIVER(cuCtxFromGreenCtx)(&context, green) == CUDA_SUCCESS) meter_context_ends(context);
  return REAL(cuGreenCtxDestroy)(green);
}

void contexts_forked(void) {
  table_clear(&contexts);
  (void)pthread_mutex_init(&context_mutex, NULL);
}
