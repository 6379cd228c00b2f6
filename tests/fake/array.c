#include "driver.h"

#include <stdlib.h>

enum { ALIGNMENT = 512, ROOM = 65536 };

struct array {
  enum magic magic;
  struct block *block;
  uint64_t bytes;
};

static uint64_t texel(CUarray_format format, unsigned int channels) {
  switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
      return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
      return 2ull * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
      return 4ull * channels;
    default:
      return 0;
  }
}

static uint64_t at_least_one(uint64_t n) { return n > 0 ? n : 1; }

/* An array and the half-sized ones below it. Rows are padded, and the whole is, as textures are. */
static uint64_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels) {
  uint64_t sum = 0, size = texel(shape->Format, shape->NumChannels);
  for (unsigned int level = 0; level < levels; level++) {
    uint64_t row = (at_least_one(shape->Width >> level) * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    sum += row * at_least_one(shape->Height >> level) * at_least_one(shape->Depth >> level);
  }
  return (sum + ROOM - 1) / ROOM * ROOM;
}

static CUresult create(void **out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels, enum magic magic) {
  struct context *context;
  REFUSE_IF(out == NULL || shape == NULL || levels == 0 || shape->Width == 0, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4, CUDA_ERROR_INVALID_VALUE);
  REFUSE_IF(texel(shape->Format, 1) == 0, CUDA_ERROR_INVALID_VALUE);
  TRY(context_need(&context));
  REFUSE_IF(capture_forbids(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  LOCKED;
  uint64_t bytes = bytes_of(shape, levels);
  struct block *block = heap_allocate(&context->heap, bytes, 0);
  REFUSE_IF(block == NULL, CUDA_ERROR_OUT_OF_MEMORY);
  struct array *array = calloc(1, sizeof *array);
  *array = (struct array){.magic = magic, .block = block, .bytes = bytes};
  *out = array;
  return CUDA_SUCCESS;
}

static CUresult destroy(struct array *array) {
  LOCKED;
  array->magic = MAGIC_DEAD;
  heap_free(array->block, 0, 0);
  free(array);
  return CUDA_SUCCESS;
}

static CUresult requirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, const struct array *array) {
  REFUSE_IF(out == NULL, CUDA_ERROR_INVALID_VALUE);
  *out = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = array->bytes, .alignment = ROOM};
  return CUDA_SUCCESS;
}

CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape) {
  CALL(cuArrayCreate_v2);
  REFUSE_IF(shape == NULL, CUDA_ERROR_INVALID_VALUE);
  const CUDA_ARRAY3D_DESCRIPTOR full = {
      .Width = shape->Width, .Height = shape->Height, .Format = shape->Format, .NumChannels = shape->NumChannels};
  return create((void **)out, &full, 1, MAGIC_ARRAY);
}

CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape) {
  CALL(cuArray3DCreate_v2);
  return create((void **)out, shape, 1, MAGIC_ARRAY);
}

CUresult cuArrayDestroy(CUarray array) {
  CALL(cuArrayDestroy);
  REFUSE_IF(!IS(array, ARRAY), CUDA_ERROR_INVALID_HANDLE);
  return destroy((struct array *)array);
}

CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUarray array, CUdevice device) {
  CALL(cuArrayGetMemoryRequirements);
  (void)device;
  REFUSE_IF(!IS(array, ARRAY), CUDA_ERROR_INVALID_HANDLE);
  return requirements(out, (const struct array *)array);
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels) {
  CALL(cuMipmappedArrayCreate);
  return create((void **)out, shape, levels, MAGIC_MIPMAP);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
  CALL(cuMipmappedArrayDestroy);
  REFUSE_IF(!IS(array, MIPMAP), CUDA_ERROR_INVALID_HANDLE);
  return destroy((struct array *)array);
}

CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *out, CUmipmappedArray array, CUdevice device) {
  CALL(cuMipmappedArrayGetMemoryRequirements);
  (void)device;
  REFUSE_IF(!IS(array, MIPMAP), CUDA_ERROR_INVALID_HANDLE);
  return requirements(out, (const struct array *)array);
}
