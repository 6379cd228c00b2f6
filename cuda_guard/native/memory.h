/* Interfaces between the parts that charge memory. */
#ifndef MESH_GUARD_MEMORY_H
#define MESH_GUARD_MEMORY_H

#include "guard.h"
#include "ledger.h"
#include "table.h"

/* Changes the job's charge at a place; false if the limit forbids it, also if it is lowered meanwhile. */
bool memory_change(int place, int64_t units, bool whatever_the_limit);

/* Charges `bytes`; false if the limit forbids it, even after memory of pools and dead processes was released. A negative place is not the
 * job's, and is not charged. */
bool memory_reserve(int place, int64_t units);
void memory_give_back(int place, int64_t units);

/* Records the charge of `key` in its context; false if there is no memory for the entry. */
bool memory_keep(struct table *table, uint64_t key, int device, int64_t units);

static inline void memory_drop(struct entry entry) {
  if (entry.key != 0) memory_give_back(entry.device, entry.units);
}

/* Returns the place of memory: a device's, GUARD_HOST, or -1 for a device that is not the job's. */
static inline int memory_place(const CUmemLocation *where) {
  return where->type == CU_MEM_LOCATION_TYPE_DEVICE ? guard_device(where->id) : GUARD_HOST;
}

/* Removes the charges of a context that is gone. */
void memory_context_gone(uint64_t context);
void pinned_context_gone(uint64_t context);

static inline int64_t units_for(size_t bytes) { return bytes > INT64_MAX ? INT64_MAX : (int64_t)units_of(bytes); }

static inline uint64_t id(const void *handle) { return (uint64_t)(uintptr_t)handle; }

/* An allocating call: reserve, call, record; `undo` if it cannot be recorded. */
#define CHARGED(table, device, size, key, call, undo)      \
  do {                                                     \
    int64_t units_ = (size);                               \
    if (!memory_reserve(device, units_)) return CUDA_ERROR_OUT_OF_MEMORY; \
    CUresult result_ = (call);                             \
    if (result_ == CUDA_SUCCESS && memory_keep(table, key, device, units_)) return CUDA_SUCCESS; \
    if (result_ == CUDA_SUCCESS) {                         \
      (void)(undo);                                        \
      result_ = CUDA_ERROR_OUT_OF_MEMORY;                  \
    }                                                      \
    memory_give_back(device, units_);                             \
    return result_;                                        \
  } while (0)

/* A freeing call: the charge is removed after the driver has freed. An unknown address or handle is forwarded. */
#define FREED(table, handle, call)                           \
  do {                                                       \
    struct entry entry_ = table_take(table, handle);         \
    CUresult result_ = (call);                               \
    if (result_ == CUDA_SUCCESS) memory_drop(entry_);               \
    if (result_ != CUDA_SUCCESS && entry_.key != 0) (void)table_put(table, entry_); \
    return result_;                                          \
  } while (0)

#define CURRENT(device)                        \
  int device = -1;                             \
  do {                                         \
    CUresult current_ = guard_current(&device); \
    if (current_ != CUDA_SUCCESS) return current_; \
    if (out == NULL) return CUDA_ERROR_INVALID_VALUE; \
  } while (0)

/* Calls, and reports success. */
#define THEN(call, then)                 \
  do {                                   \
    CUresult result_ = (call);           \
    if (result_ == CUDA_SUCCESS) (then); \
    return result_;                      \
  } while (0)

void pinned_forked(void);
void pools_forked(void);
void graphs_forked(void);
void contexts_forked(void);

#endif
