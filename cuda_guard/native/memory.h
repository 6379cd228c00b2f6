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
bool memory_fits(int place, int64_t units); /* the same, and a refusal is not counted */
void memory_give_back(int place, int64_t units);

static inline void memory_drop(struct entry entry) {
  if (entry.key != 0) memory_give_back(entry.device, entry.units);
}

/* Finds the place of memory: a device's, or GUARD_HOST. CUDA_ERROR_NOT_PERMITTED for a kind of memory or location that is not known, since
 * it may be on any device. */
CUresult memory_place(const CUmemLocation *where, int type, int *place);

/* Removes the charges of a context that is gone. */
void memory_context_gone(uint64_t context);
void pinned_context_gone(uint64_t context);

static inline int64_t units_for(size_t bytes) { return bytes > INT64_MAX ? INT64_MAX : (int64_t)units_of(bytes); }

static inline uint64_t id(const void *handle) { return (uint64_t)(uintptr_t)handle; }

/* What an allocating call is charged: charge_make before it, charge_keep after it, with its result. */
struct charge {
  int place;
  int64_t units;
};

/* Charges the device of the calling thread's context for something that will be written to `out`. */
CUresult charge_current(struct charge *charge, const void *out);

/* The same for a place; one that is not the job's (negative) is not charged. */
CUresult charge_make(struct charge charge);

/* Records the charge under `key`; removes it if the call has failed. What cannot be recorded is undone: no memory is left. */
CUresult charge_keep(struct table *table, uint64_t key, struct charge charge, CUresult result, void (*undo)(uint64_t key));

/* After a freeing call with this result: removes the charge, which was taken from the table before it, or puts it back. */
CUresult charge_drop(struct table *table, struct entry entry, CUresult result);

void pinned_forked(void);
void pools_forked(void);
void graphs_forked(void);
void contexts_forked(void);

#endif
