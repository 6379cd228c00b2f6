/* Table of driver objects by handle or address: open addressing, one lock. Handles are never 0. */
#ifndef MESH_GUARD_TABLE_H
#define MESH_GUARD_TABLE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct entry {
  uint64_t key;
  int64_t units;
  uint64_t link; /* what it belongs to: a context, a handle, ... */
  int32_t device;
  int32_t count;
};

struct table {
  pthread_mutex_t mutex;
  struct entry *entries;
  size_t size;          /* slots */
  _Atomic size_t used;  /* slots with an entry; 0 may be read without the lock */
};

#define TABLE_EMPTY {.mutex = PTHREAD_MUTEX_INITIALIZER}

/* Adds or replaces an entry; false if there is no memory for it. */
bool table_put(struct table *table, struct entry entry);

/* Returns the entry of a key; its key is 0 if there is none. */
struct entry table_get(struct table *table, uint64_t key);

/* The same, and removes it. */
struct entry table_take(struct table *table, uint64_t key);

/* Removes and returns any entry that `matches`; its key is 0 if there is none. */
struct entry table_take_any(struct table *table, bool (*matches)(const struct entry *entry, const void *what), const void *what);

/* For table_take_any: tells whether an entry belongs to the context, the handle or whatever else `what` points to the number of. */
static inline bool belongs_to(const struct entry *entry, const void *what) {
  const uint64_t *link = what;
  return entry->link == *link;
}

/* Adds to an entry's count; returns the changed entry. */
struct entry table_count(struct table *table, uint64_t key, int32_t change);

/* Calls `each` for every entry, under the lock. */
void table_each(struct table *table, void (*each)(struct entry *entry, void *with), void *with);

/* Empties it in a forked child. Another thread of the parent may have been changing it, so nothing is freed. */
void table_clear(struct table *table);

#endif
