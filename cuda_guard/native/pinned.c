/* Pinned host memory. The kernel does not charge memory that a driver allocates to a control group, so the job's limit is enforced here,
 * like a device's. */
#include "memory.h"

#define PAGE ((size_t)4096)

static struct table pinned = TABLE_EMPTY; /* address -> units, context */

static int64_t pages_for(size_t bytes) { return bytes > SIZE_MAX - PAGE ? INT64_MAX : units_for((bytes + PAGE - 1) & ~(PAGE - 1)); }

static void free_pinned(uint64_t key) { (void)REAL(cuMemFreeHost)((void *)(uintptr_t)key); }
static void unregister(uint64_t key) { (void)REAL(cuMemHostUnregister)((void *)(uintptr_t)key); }

/* Needs a current context, of any device. */
static CUresult charge_pinned(struct charge *charge, size_t bytes, const void *at) {
  *charge = (struct charge){.place = GUARD_HOST, .units = pages_for(bytes)};
  int device;
  CUresult result = guard_current(&device);
  if (result != CUDA_SUCCESS) return result;
  return at == NULL ? CUDA_ERROR_INVALID_VALUE : charge_make(*charge);
}

CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
  struct charge charge;
  CUresult result = charge_pinned(&charge, bytes, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemAllocHost_v2)(out, bytes);
  return charge_keep(&pinned, id(*out), charge, result, free_pinned);
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
  struct charge charge;
  CUresult result = charge_pinned(&charge, bytes, out);
  if (result != CUDA_SUCCESS) return result;
  result = REAL(cuMemHostAlloc)(out, bytes, flags);
  return charge_keep(&pinned, id(*out), charge, result, free_pinned);
}

/* The program's own memory, already charged to its control group; pinned, it cannot be swapped out. */
static CUresult pin(CUresult (*real)(void *, size_t, unsigned int), void *pointer, size_t bytes, unsigned int flags) {
  struct charge charge;
  CUresult result = charge_pinned(&charge, bytes, pointer);
  if (result != CUDA_SUCCESS) return result;
  result = real(pointer, bytes, flags);
  return charge_keep(&pinned, id(pointer), charge, result, unregister);
}

CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags) {
  return pin(REAL(cuMemHostRegister), pointer, bytes, flags);
}

CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags) {
  return pin(REAL(cuMemHostRegister_v2), pointer, bytes, flags);
}

CUresult cuMemFreeHost(void *pointer) {
  struct entry entry = table_take(&pinned, id(pointer));
  return charge_drop(&pinned, entry, REAL(cuMemFreeHost)(pointer));
}

CUresult cuMemHostUnregister(void *pointer) {
  struct entry entry = table_take(&pinned, id(pointer));
  return charge_drop(&pinned, entry, REAL(cuMemHostUnregister)(pointer));
}

void pinned_context_gone(uint64_t context) {
  struct entry entry;
  while ((entry = table_take_any(&pinned, belongs_to, &context)).key != 0) memory_drop(entry);
}

void pinned_forked(void) { table_clear(&pinned); }
