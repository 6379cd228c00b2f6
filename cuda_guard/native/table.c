#include "table.h"

#include <stdlib.h>

#define LEAST 64

static size_t place(const struct table *table, uint64_t key) {
  uint64_t hash = key * UINT64_C(0x9E3779B97F4A7C15);
  size_t at = (size_t)(hash >> 32) & (table->size - 1);
  while (table->entries[at].key != 0 && table->entries[at].key != key) at = (at + 1) & (table->size - 1);
  return at;
}

static bool grow(struct table *table) {
  struct table larger = {.size = table->size == 0 ? LEAST : 2 * table->size};
  larger.entries = calloc(larger.size, sizeof *larger.entries);
  if (larger.entries == NULL) return false;
  for (size_t i = 0; i < table->size; i++)
    if (table->entries[i].key != 0) larger.entries[place(&larger, table->entries[i].key)] = table->entries[i];
  free(table->entries);
  table->entries = larger.entries;
  table->size = larger.size;
  return true;
}

bool table_put(struct table *table, struct entry entry) {
  (void)pthread_mutex_lock(&table->mutex);
  bool room = 2 * (table->used + 1) <= table->size || grow(table);
  if (room) {
    struct entry *at = &table->entries[place(table, entry.key)];
    table->used += at->key == 0;
    *at = entry;
  }
  (void)pthread_mutex_unlock(&table->mutex);
  return room;
}

struct entry table_get(struct table *table, uint64_t key) { return table_count(table, key, 0); }

struct entry table_count(struct table *table, uint64_t key, int32_t change) {
  struct entry found = {0};
  (void)pthread_mutex_lock(&table->mutex);
  if (table->size != 0) {
    struct entry *at = &table->entries[place(table, key)];
    if (at->key != 0) {
      at->count += change;
      found = *at;
    }
  }
  (void)pthread_mutex_unlock(&table->mutex);
  return found;
}

/* Entries after the gap that would no longer be found move up. */
static struct entry take_at(struct table *table, size_t gap) {
  struct entry taken = table->entries[gap];
  table->entries[gap].key = 0;
  table->used--;
  for (size_t at = (gap + 1) & (table->size - 1); table->entries[at].key != 0; at = (at + 1) & (table->size - 1)) {
    struct entry moved = table->entries[at];
    table->entries[at].key = 0;
    table->entries[place(table, moved.key)] = moved;
  }
  return taken;
}

struct entry table_take(struct table *table, uint64_t key) {
  struct entry taken = {0};
  (void)pthread_mutex_lock(&table->mutex);
  if (table->size != 0) {
    size_t at = place(table, key);
    if (table->entries[at].key != 0) taken = take_at(table, at);
  }
  (void)pthread_mutex_unlock(&table->mutex);
  return taken;
}

struct entry table_take_any(struct table *table, bool (*matches)(const struct entry *entry, const void *what), const void *what) {
  struct entry taken = {0};
  (void)pthread_mutex_lock(&table->mutex);
  for (size_t i = 0; i < table->size && taken.key == 0; i++)
    if (table->entries[i].key != 0 && matches(&table->entries[i], what)) taken = take_at(table, i);
  (void)pthread_mutex_unlock(&table->mutex);
  return taken;
}

void table_each(struct table *table, void (*each)(struct entry *entry, void *with), void *with) {
  (void)pthread_mutex_lock(&table->mutex);
  for (size_t i = 0; i < table->size; i++)
    if (table->entries[i].key != 0) each(&table->entries[i], with);
  (void)pthread_mutex_unlock(&table->mutex);
}

void table_clear(struct table *table) { *table = (struct table)TABLE_EMPTY; }
