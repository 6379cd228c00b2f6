#include "driver.h"

#include <stdlib.h>

enum { DEPTH = 64, CONTEXT_LIMITS = 16 };

static struct context *contexts, *primaries[WORLD_DEVICES];
static uint32_t numbers;
static _Thread_local struct {
  struct context *at[DEPTH];
  int depth;
} stack;

struct context *context_current(void) { return stack.depth > 0 ? stack.at[stack.depth - 1] : NULL; }

CUresult context_need(struct context **out) {
  *out = context_current();
  REFUSE_IF(*out == NULL, CUDA_ERROR_INVALID_CONTEXT);
  return (*out)->magic == MAGIC_CONTEXT ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

bool context_shares(const struct context *one, const struct context *other) {
  return one == other || (one->primary && other->primary && one->device == other->device);
}

static uint64_t weight(void) { return world_granules(driver_world, driver_world->config.context_bytes); }

/* A context takes memory of its own, unless it is a part of another. */
static CUresult open_context(struct context *context, int device, unsigned int flags) {
  world_lock(driver_world);
  bool taken = context->green != NULL || world_take(driver_world, driver_self, device, weight());
  world_unlock(driver_world);
  REFUSE_IF(!taken, CUDA_ERROR_OUT_OF_MEMORY);
  *context = (struct context){
      .magic = MAGIC_CONTEXT,
      .device = device,
      .flags = flags,
      .number = ++numbers,
      .part_ppm = WORLD_WHOLE,
      .primary = context->primary,
      .green = context->green,
      .retained = 1,
      .heap = {.device = device, .chunk_size = driver_world->config.granule},
      .next = contexts,
  };
  contexts = context;
  return CUDA_SUCCESS;
}

/* Its handle stays, so that threads that still use it are told so. */
static void close_context(struct context *context) {
  context->magic = MAGIC_DEAD;
  stream_free_all(context);
  heap_clear(&context->heap);
  for (struct context **c = &contexts; *c != NULL; c = &(*c)->next)
    if (*c == context) {
      *c = context->next;
      break;
    }
  world_lock(driver_world);
  if (context->green == NULL) world_give(driver_world, driver_self, context->device, weight());
  world_unlock(driver_world);
}

void context_synchronize(const struct context *context) {
  world_lock(driver_world);
  for (uint32_t i = 0; i < WORLD_LANES; i++) {
    const struct lane *lane = &driver_self->lanes[i];
    if (lane->context == context->number && lane->head != 0) world_await(driver_world, driver_self, i, lane->submitted);
  }
  world_unlock(driver_world);
}

static CUresult synchronize(struct context *context) {
  bool ends = capture_ends_in(context); /* whatever the modes */
  REFUSE_IF(capture_forbids() || ends, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  context_synchronize(context);
  pool_synchronized(context->device);
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
  struct context *context;
  CALL(cuCtxSynchronize);
  TRY(context_need(&context));
  return synchronize(context);
}

CUresult cuCtxSynchronize_v2(CUcontext handle) {
  struct context *context = (struct context *)handle;
  CALL(cuCtxSynchronize_v2);
  if (context == NULL) TRY(context_need(&context));
  REFUSE_IF(!IS(context, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
  return synchronize(context);
}

/* The primary context of a device, which all libraries of a process share. */

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
  CALL(cuDevicePrimaryCtxRetain);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  struct context *context = primaries[device];
  if (context == NULL) context = primaries[device] = calloc(1, sizeof *context);
  context->primary = true;
  if (context->retained > 0)
    context->retained++;
  else
    TRY(open_context(context, device, context->flags));
  *out = (CUcontext)context;
  return CUDA_SUCCESS;
}

static CUresult release(CUdevice device, bool all) {
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  struct context *context = primaries[device];
  if (context == NULL || context->retained == 0) return all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  if (!all && context->retained > 1) {
    context->retained--;
    return CUDA_SUCCESS;
  }
  context_synchronize(context);
  LOCKED;
  close_context(context);
  context->retained = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  CALL(cuDevicePrimaryCtxRelease_v2);
  return release(device, false);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  CALL(cuDevicePrimaryCtxRelease);
  return release(device, false);
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
  CALL(cuDevicePrimaryCtxReset_v2);
  return release(device, true);
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  CALL(cuDevicePrimaryCtxReset);
  return release(device, true);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
  CALL(cuDevicePrimaryCtxGetState);
  REFUSE_IF(flags == NULL || active == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  const struct context *context = primaries[device];
  *flags = context != NULL ? context->flags : 0;
  *active = context != NULL && context->retained > 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
  CALL(cuDevicePrimaryCtxSetFlags_v2);
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  if (primaries[device] == NULL) primaries[device] = calloc(1, sizeof *primaries[device]);
  primaries[device]->flags = flags;
  return CUDA_SUCCESS;
}

/* Contexts of one's own. */

static CUresult create(CUcontext *out, unsigned int flags, CUdevice device) {
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(stack.depth == DEPTH, CUDA_ERROR_OUT_OF_MEMORY);
  LOCKED;
  struct context *context = calloc(1, sizeof *context);
  CUresult problem = open_context(context, device, flags);
  if (problem) {
    free(context);
    return problem;
  }
  stack.at[stack.depth++] = context;
  *out = (CUcontext)context;
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) {
  CALL(cuCtxCreate_v2);
  return create(out, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext *out, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device) {
  CALL(cuCtxCreate_v3);
  REFUSE_IF(affinity != NULL || count != 0, CUDA_ERROR_NOT_SUPPORTED);
  return create(out, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags, CUdevice device) {
  CALL(cuCtxCreate_v4);
  REFUSE_IF(params != NULL, CUDA_ERROR_NOT_SUPPORTED);
  return create(out, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  struct context *context = (struct context *)handle;
  CALL(cuCtxDestroy_v2);
  REFUSE_IF(!IS(context, CONTEXT) || context->primary, CUDA_ERROR_INVALID_CONTEXT);
  if (context_current() == context) stack.depth--;
  context_end(context);
  return CUDA_SUCCESS;
}

/* From before CUDA 4. */

CUresult cuCtxAttach(CUcontext *out, unsigned int flags) {
  struct context *context;
  CALL(cuCtxAttach);
  REFUSE_IF(out == NULL || flags != 0, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  LOCKED;
  context->retained++;
  *out = (CUcontext)context;
  return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext handle) {
  struct context *context = (struct context *)handle;
  CALL(cuCtxDetach);
  REFUSE_IF(!IS(context, CONTEXT) || context->primary || context != context_current(), CUDA_ERROR_INVALID_CONTEXT);
  if (context->retained-- > 1) return CUDA_SUCCESS;
  stack.depth--;
  context_end(context);
  return CUDA_SUCCESS;
}

struct context *context_of_part(int device, uint32_t part_ppm, struct green *green) {
  struct context *context = calloc(1, sizeof *context);
  *context = (struct context){.primary = true, .green = green};
  if (open_context(context, device, 0) != CUDA_SUCCESS) {
    free(context);
    return NULL;
  }
  context->part_ppm = part_ppm;
  return context;
}

void context_end(struct context *context) {
  context_synchronize(context);
  LOCKED;
  close_context(context);
}

/* Which one a thread works in. */

CUresult cuCtxSetCurrent(CUcontext handle) {
  CALL(cuCtxSetCurrent);
  REFUSE_IF(handle != NULL && !IS(handle, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
  if (stack.depth > 0) stack.depth--;
  if (handle != NULL) stack.at[stack.depth++] = (struct context *)handle;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) {
  CALL(cuCtxGetCurrent);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  *out = (CUcontext)context_current();
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  CALL(cuCtxPushCurrent_v2);
  REFUSE_IF(!IS(handle, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
  REFUSE_IF(stack.depth == DEPTH, CUDA_ERROR_INVALID_VALUE);
  stack.at[stack.depth++] = (struct context *)handle;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *out) {
  CALL(cuCtxPopCurrent_v2);
  REFUSE_IF(stack.depth == 0, CUDA_ERROR_INVALID_CONTEXT);
  struct context *top = stack.at[--stack.depth];
  if (out != NULL) *out = (CUcontext)top;
  return CUDA_SUCCESS;
}

static CUresult device_of(CUdevice *out, CUcontext handle) {
  struct context *context = (struct context *)handle;
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  if (context == NULL) TRY(context_need(&context));
  *out = context->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *out) {
  CALL(cuCtxGetDevice);
  return device_of(out, NULL);
}

CUresult cuCtxGetDevice_v2(CUdevice *out, CUcontext handle) {
  CALL(cuCtxGetDevice_v2);
  REFUSE_IF(handle != NULL && !IS(handle, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
  return device_of(out, handle);
}

CUresult cuCtxGetFlags(unsigned int *flags) {
  struct context *context;
  CALL(cuCtxGetFlags);
  REFUSE_IF(flags == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  *flags = context->flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
  struct context *context = (struct context *)handle;
  CALL(cuCtxGetId);
  REFUSE_IF(id == NULL, CUDA_ERROR_INVALID_VALUE);
  if (context == NULL) TRY(context_need(&context));
  REFUSE_IF(!IS(context, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
  *id = context->number;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
  CALL(cuCtxGetApiVersion);
  REFUSE_IF(version == NULL, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(handle != NULL && !IS(handle, CONTEXT), CUDA_ERROR_INVALID_CONTEXT);
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  CALL(cuCtxGetStreamPriorityRange);
  if (least != NULL) *least = 0;
  if (greatest != NULL) *greatest = -5;
  return CUDA_SUCCESS;
}

static size_t limits[CONTEXT_LIMITS] = {1024, 1 << 20, 8 << 20};

CUresult cuCtxGetLimit(size_t *value, int limit) {
  CALL(cuCtxGetLimit);
  REFUSE_IF(value == NULL || limit < 0 || limit >= CONTEXT_LIMITS, CUDA_ERROR_INVALID_VALUE);
  *value = limits[limit];
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(int limit, size_t value) {
  CALL(cuCtxSetLimit);
  REFUSE_IF(limit < 0 || limit >= CONTEXT_LIMITS, CUDA_ERROR_INVALID_VALUE);
  limits[limit] = value;
  return CUDA_SUCCESS;
}
