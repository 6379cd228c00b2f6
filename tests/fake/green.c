/* Green contexts: parts of a device's multiprocessors, with contexts and streams that use no others. */
#include "driver.h"

#include <stdlib.h>

enum { MULTIPROCESSORS = 132, STEP = 8, RESOURCE_SM = 1 }; /* of an H200, and in what steps its multiprocessors are given */

/* CUdevResource, as of CUDA 12.4. */
struct resource {
  int type;
  unsigned char internal[92];
  unsigned int multiprocessors;
  unsigned char rest[44];
};

struct green {
  enum magic magic;
  struct context *context;
  unsigned int multiprocessors;
};

static struct resource of(unsigned int multiprocessors) {
  return (struct resource){.type = RESOURCE_SM, .multiprocessors = multiprocessors};
}

CUresult cuDeviceGetDevResource(CUdevice device, struct resource *out, int type) {
  CALL(cuDeviceGetDevResource);
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  REFUSE_IF(out == NULL || type != RESOURCE_SM, CUDA_ERROR_INVALID_VALUE);
  *out = of(MULTIPROCESSORS);
  return CUDA_SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(struct resource *parts, unsigned int *count, const struct resource *whole,
                                     struct resource *rest, unsigned int flags, unsigned int least) {
  CALL(cuDevSmResourceSplitByCount);
  REFUSE_IF(count == NULL || whole == NULL || whole->type != RESOURCE_SM || flags > 3, CUDA_ERROR_INVALID_VALUE);
  unsigned int each = (least + STEP - 1) / STEP * STEP;
  if (each == 0) each = STEP;
  unsigned int most = whole->multiprocessors / each;
  REFUSE_IF(most == 0, CUDA_ERROR_INVALID_VALUE);
  if (parts == NULL || *count > most) *count = most;
  for (unsigned int i = 0; parts != NULL && i < *count; i++) parts[i] = of(each);
  if (rest != NULL) *rest = of(whole->multiprocessors - *count * each);
  return CUDA_SUCCESS;
}

CUresult cuDevResourceGenerateDesc(void **out, const struct resource *resources, unsigned int count) {
  uintptr_t sum = 0;
  CALL(cuDevResourceGenerateDesc);
  REFUSE_IF(out == NULL || resources == NULL || count == 0, CUDA_ERROR_INVALID_VALUE);
  for (unsigned int i = 0; i < count; i++) sum += resources[i].multiprocessors;
  REFUSE_IF(sum == 0 || sum > MULTIPROCESSORS, CUDA_ERROR_INVALID_VALUE);
  *out = (void *)sum; /* nobody looks into it */
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx *out, void *description, CUdevice device, unsigned int flags) {
  enum { DEFAULT_STREAM = 1 };
  uintptr_t multiprocessors = (uintptr_t)description;
  CALL(cuGreenCtxCreate);
  REFUSE_IF(out == NULL || multiprocessors == 0 || multiprocessors > MULTIPROCESSORS || flags != DEFAULT_STREAM,
            CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(device < 0 || (uint32_t)device >= driver_world->config.devices, CUDA_ERROR_INVALID_DEVICE);
  LOCKED;
  struct green *green = malloc(sizeof *green);
  struct context *context = context_of_part(device, (uint32_t)(multiprocessors * WORLD_WHOLE / MULTIPROCESSORS), green);
  REFUSE_IF(context == NULL, CUDA_ERROR_OUT_OF_MEMORY);
  *green = (struct green){MAGIC_GREEN, context, (unsigned int)multiprocessors};
  *out = (CUgreenCtx)green;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
  struct green *green = (struct green *)handle;
  CALL(cuGreenCtxDestroy);
  REFUSE_IF(!IS(green, GREEN), CUDA_ERROR_INVALID_HANDLE);
  context_end(green->context);
  green->magic = MAGIC_DEAD;
  return CUDA_SUCCESS;
}

CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx handle) {
  CALL(cuCtxFromGreenCtx);
  REFUSE_IF(out == NULL || !IS(handle, GREEN), CUDA_ERROR_INVALID_VALUE);
  *out = (CUcontext)((struct green *)handle)->context;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx handle, unsigned int flags, int priority) {
  CALL(cuGreenCtxStreamCreate);
  REFUSE_IF(!IS(handle, GREEN) || flags != 1, CUDA_ERROR_INVALID_VALUE); /* only non-blocking ones */
  return stream_create(out, ((struct green *)handle)->context, flags, priority);
}

/* NULL of a stream that is in none. */
CUresult cuStreamGetGreenCtx(CUstream handle, CUgreenCtx *out) {
  struct stream *stream;
  CALL(cuStreamGetGreenCtx);
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(stream_find(handle, CU_STREAM_LEGACY, &stream));
  *out = (CUgreenCtx)stream->context->green;
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxGetDevResource(CUgreenCtx handle, struct resource *out, int type) {
  CALL(cuGreenCtxGetDevResource);
  REFUSE_IF(out == NULL || !IS(handle, GREEN) || type != RESOURCE_SM, CUDA_ERROR_INVALID_VALUE);
  *out = of(((struct green *)handle)->multiprocessors);
  return CUDA_SUCCESS;
}
