/* Allocations of a context, and the host's. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

enum { PITCH = 512 };

static CUresult allocate(CUdeviceptr *out, size_t bytes, bool managed) {
  struct context *context;
  REFUSE_IF(out == NULL || bytes == 0, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  REFUSE_IF(capture_forbids(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  LOCKED;
  struct block *block = heap_allocate(&context->heap, bytes, 0);
  REFUSE_IF(block == NULL, CUDA_ERROR_OUT_OF_MEMORY);
  block->managed = managed;
  *out = block->address;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
  CALL(cuMemAlloc_v2);
  return allocate(out, bytes, false);
}

CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element) {
  CALL(cuMemAllocPitch_v2);
  REFUSE_IF(pitch == NULL || width == 0 || height == 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(element != 4 && element != 8 && element != 16, CUDA_ERROR_INVALID_VALUE);
  size_t row = (width + PITCH - 1) / PITCH * PITCH, bytes;
  REFUSE_IF(row < width || __builtin_mul_overflow(row, height, &bytes), CUDA_ERROR_OUT_OF_MEMORY);
  TRY(allocate(out, bytes, false));
  *pitch = row;
  return CUDA_SUCCESS;
}

/* As if all of it were on the device at once, where the real one moves it there by and by. */
CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned int flags) {
  CALL(cuMemAllocManaged);
  REFUSE_IF(flags != 1 && flags != 2, CUDA_ERROR_INVALID_VALUE);
  return allocate(out, bytes, true);
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  struct context *context;
  CALL(cuMemFree_v2);
  if (pointer == 0) return CUDA_SUCCESS;
  TRY(context_need(&context));
  REFUSE_IF(capture_forbids(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  context_synchronize(context); /* as the real one does, though it promises nothing */
  LOCKED;
  if (graph_free(pointer) || shared_free(pointer)) return CUDA_SUCCESS;
  struct block *block = heap_find(pointer);
  REFUSE_IF(block == NULL, CUDA_ERROR_INVALID_VALUE);
  heap_free(block, 0, 0);
  return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  struct context *context;
  CALL(cuMemGetInfo_v2);
  REFUSE_IF(free_bytes == NULL || total == NULL, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  world_lock(driver_world);
  world_reap(driver_world);
  const struct device *device = &driver_world->devices[context->device];
  *free_bytes = device->memory - device->used;
  *total = device->memory;
  world_unlock(driver_world);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
  CALL(cuMemGetAddressRange_v2);
  LOCKED;
  struct block *block = heap_containing(pointer);
  REFUSE_IF(block == NULL, CUDA_ERROR_INVALID_VALUE);
  if (base != NULL) *base = block->address;
  if (size != NULL) *size = block->size;
  return CUDA_SUCCESS;
}

static CUresult attribute(void *data, int which, CUdeviceptr pointer) {
  const struct block *block = heap_containing(pointer);
  REFUSE_IF(data == NULL || block == NULL, CUDA_ERROR_INVALID_VALUE);
  switch (which) {
    case 2: /* type of memory: the host's or the device's */
      *(unsigned int *)data = block->chunk->heap->device == HEAP_HOST ? 1 : 2;
      return CUDA_SUCCESS;
    case 3: /* as the device knows it */
      *(CUdeviceptr *)data = pointer;
      return CUDA_SUCCESS;
    case 8:
      *(unsigned char *)data = block->managed;
      return CUDA_SUCCESS;
    case 9:
      REFUSE_IF(block->chunk->heap->device == HEAP_HOST, CUDA_ERROR_NOT_SUPPORTED);
      *(int *)data = block->chunk->heap->device;
      return CUDA_SUCCESS;
    case 11:
      *(CUdeviceptr *)data = block->address;
      return CUDA_SUCCESS;
    case 12:
      *(size_t *)data = block->size;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuPointerGetAttribute(void *data, int which, CUdeviceptr pointer) {
  CALL(cuPointerGetAttribute);
  LOCKED;
  return attribute(data, which, pointer);
}

CUresult cuPointerGetAttributes(unsigned int count, int *which, void **data, CUdeviceptr pointer) {
  CALL(cuPointerGetAttributes);
  LOCKED;
  for (unsigned int i = 0; i < count; i++) TRY(attribute(data[i], which[i], pointer));
  return CUDA_SUCCESS;
}

/* Pinned memory of the host. */

static struct range {
  uint64_t address, size;
  struct range *next;
} *pinned;

static CUresult pin(void *pointer, size_t bytes) {
  struct range *range = malloc(sizeof *range);
  LOCKED;
  *range = (struct range){.address = (uint64_t)(uintptr_t)pointer, .size = bytes, .next = pinned};
  pinned = range;
  return CUDA_SUCCESS;
}

static CUresult unpin(const void *pointer) {
  LOCKED;
  for (struct range **r = &pinned; *r != NULL; r = &(*r)->next) {
    struct range *range = *r;
    if (range->address != (uint64_t)(uintptr_t)pointer) continue;
    *r = range->next;
    free(range);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

bool memory_is_pinned(uint64_t address) {
  for (const struct range *r = pinned; r != NULL; r = r->next)
    if (address - r->address < r->size) return true;
  return false;
}

static CUresult host_allocate(void **out, size_t bytes) {
  struct context *context;
  REFUSE_IF(out == NULL || bytes == 0, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  return posix_memalign(out, 4096, bytes) == 0 ? pin(*out, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
  CALL(cuMemAllocHost_v2);
  return host_allocate(out, bytes);
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
  CALL(cuMemHostAlloc);
  REFUSE_IF(flags > 7, CUDA_ERROR_INVALID_VALUE);
  return host_allocate(out, bytes);
}

CUresult cuMemFreeHost(void *pointer) {
  CALL(cuMemFreeHost);
  TRY(unpin(pointer));
  free(pointer);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *pointer, unsigned int flags) {
  CALL(cuMemHostGetDevicePointer_v2);
  REFUSE_IF(out == NULL || pointer == NULL || flags != 0, CUDA_ERROR_INVALID_VALUE);
  *out = (CUdeviceptr)(uintptr_t)pointer;
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags) {
  CALL(cuMemHostRegister_v2);
  (void)flags;
  return pointer != NULL && bytes != 0 ? pin(pointer, bytes) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostUnregister(void *pointer) {
  CALL(cuMemHostUnregister);
  return unpin(pointer);
}
