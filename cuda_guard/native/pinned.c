/* Pinned host memory. The kernel does not charge memory that a driver allocates to a control group, so the job's limit is enforced here,
 * like a device's. */
#include "memory.h"

#define PAGE ((size_t)4096)

static struct table pinned = TABLE_EMPTY; /* address -> units, context */

static int64_t pages_for(size_t bytes) { return bytes > SIZE_MAX - PAGE ? INT64_MAX : units_for((bytes + PAGE - 1) & ~(PAGE - 1)); }

/* Returns the error if the thread has no current context. */
#define PINS                                                       \
  do {                                                             \
    int device_;                                                   \
    CUresult current_ = guard_current(&device_);                   \
    if (current_ != CUDA_SUCCESS) return current_;                 \
  } while (0)

CUresult cuMemAllocHost_v2(void **out, size_t bytes) {
  PINS;
  if (out == NULL) return CUDA_ERROR_INVALID_VALUE;
  CHARGED(&pinned, GUARD_HOST, pages_for(bytes), id(*out), REAL(cuMemAllocHost_v2)(out, bytes), REAL(cuMemFreeHost)(*out));
}

CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned int flags) {
  PINS;
  if (out == NULL) return CUDA_ERROR_INVALID_VALUE;
  CHARGED(&pinned, GUARD_HOST, pages_for(bytes), id(*out), REAL(cuMemHostAlloc)(out, bytes, flags), REAL(cuMemFreeHost)(*out));
}

/* The program's own memory, already charged to its control group; pinned, it cannot be swapped out. */
#define REGISTERED(name)                                                                                     \
  CUresult name(void *pointer, size_t bytes, unsigned int flags) {                                           \
    PINS;                                                                                                    \
    CHARGED(&pinned, GUARD_HOST, pages_for(bytes), id(pointer), REAL(name)(pointer, bytes, flags), \
            REAL(cuMemHostUnregister)(pointer));                                                             \
  }
REGISTERED(cuMemHostRegister)
REGISTERED(cuMemHostRegister_v2)

CUresult cuMemFreeHost(void *pointer) { FREED(&pinned, id(pointer), REAL(cuMemFreeHost)(pointer)); }

CUresult cuMemHostUnregister(void *pointer) { FREED(&pinned, id(pointer), REAL(cuMemHostUnregister)(pointer)); }

static bool belongs(const struct entry *entry, const void *what) {
  const uint64_t *context = what;
  return entry->link == *context;
}

void pinned_context_gone(uint64_t context) {
  struct entry entry;
  while ((entry = table_take_any(&pinned, belongs, &context)).key != 0) memory_drop(entry);
}

void pinned_forked(void) { table_clear(&pinned); }
