/* Memory of a device, or of the host for devices, and the addresses that it is known by.
 *
 * Addresses come out of one reserved stretch of the process's own, so that small copies can really be made: a page of it takes
 * memory of the host once it is touched, and not before. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { UNIT = 512, SMALL = 1 << 20, BUCKETS = 8192, PAGE = 2 << 20 };

struct gap {
  uint64_t address, size;
  struct gap *next;
};

static uint64_t arena, arena_size;
static struct chunk **owners; /* of each page of the arena */
static struct chunk mapped;   /* owner of what cuMemMap has put something at */
static struct gap *gaps;
static struct block *table[BUCKETS];

static uint64_t up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static struct block **bucket(uint64_t address) { return &table[address / UNIT * 0x9e3779b97f4a7c15ull >> 51]; }

static bool reserve_arena(void) {
  for (uint64_t size = 1ull << 44; arena == 0 && size >= 1ull << 36; size /= 2) {
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) continue;
    madvise(at, size, MADV_DONTDUMP);
    arena = up((uint64_t)(uintptr_t)at, PAGE);
    arena_size = size - PAGE;
    owners =
        mmap(NULL, size / PAGE * sizeof *owners, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    gaps = malloc(sizeof *gaps);
    *gaps = (struct gap){.address = arena, .size = arena_size};
  }
  return arena != 0;
}

/* Takes the first such addresses; those at `wish` and no others, unless it is 0. */
static uint64_t take(uint64_t bytes, uint64_t alignment, uint64_t wish) {
  for (struct gap **g = &gaps; *g != NULL; g = &(*g)->next) {
    struct gap *gap = *g;
    uint64_t at = wish != 0 ? wish : up(gap->address, alignment), end = gap->address + gap->size;
    if (at < gap->address || at + bytes > end) continue;
    if (at > gap->address) {
      struct gap *before = malloc(sizeof *before);
      *before = (struct gap){.address = gap->address, .size = at - gap->address, .next = gap};
      *g = before;
      g = &before->next;
    }
    gap->address = at + bytes;
    gap->size = end - gap->address;
    if (gap->size == 0) {
      *g = gap->next;
      free(gap);
    }
    return at;
  }
  return 0;
}

uint64_t heap_address(uint64_t bytes, uint64_t alignment) {
  return arena != 0 || reserve_arena() ? take(bytes, alignment, 0) : 0;
}

void heap_vacate(uint64_t address, uint64_t bytes) {
  struct gap **g = &gaps;
  madvise((void *)(uintptr_t)address, bytes, MADV_DONTNEED);
  while (*g != NULL && (*g)->address + (*g)->size < address) g = &(*g)->next;
  if (*g != NULL && (*g)->address + (*g)->size == address) {
    (*g)->size += bytes;
  } else {
    struct gap *gap = malloc(sizeof *gap);
    *gap = (struct gap){.address = address, .size = bytes, .next = *g};
    *g = gap;
  }
  struct gap *gap = *g, *next = gap->next;
  if (next != NULL && gap->address + gap->size == next->address) {
    gap->size += next->size;
    gap->next = next->next;
    free(next);
  }
}

static void own(struct chunk *chunk, uint64_t address, uint64_t size) {
  for (uint64_t at = address; at < address + size; at += PAGE) owners[(at - arena) / PAGE] = chunk;
}

void heap_map(uint64_t address, uint64_t bytes, bool there) { own(there ? &mapped : NULL, address, bytes); }

static struct chunk *owner_of(uint64_t address) {
  return arena != 0 && address - arena < arena_size ? owners[(address - arena) / PAGE] : NULL;
}

bool heap_known(uint64_t address) { return arena == 0 || address - arena >= arena_size || owner_of(address) != NULL; }

bool heap_ours(uint64_t address) { return owner_of(address) != NULL; }

static struct block *new_block(struct chunk *chunk, uint64_t address, uint64_t size, struct block *before) {
  struct block *block = calloc(1, sizeof *block);
  *block = (struct block){.address = address, .size = size, .chunk = chunk, .before = before};
  block->after = before != NULL ? before->after : NULL;
  if (before != NULL) before->after = block;
  if (block->after != NULL) block->after->before = block;
  return block;
}

/* Memory for addresses that were taken (0: there were none); they go back if there is none. */
static bool back(struct heap *heap, uint64_t address, uint64_t size) {
  bool taken = address != 0;
  if (taken && heap->device != HEAP_HOST) {
    world_lock(driver_world);
    taken = world_take(driver_world, driver_self, heap->device, size);
    world_unlock(driver_world);
  }
  if (!taken) {
    if (address != 0) heap_vacate(address, size);
    return false;
  }
  heap->reserved += size;
  if (heap->reserved > heap->reserved_high) heap->reserved_high = heap->reserved;
  return true;
}

static void unback(struct heap *heap, uint64_t address, uint64_t size) {
  if (heap->device != HEAP_HOST) {
    world_lock(driver_world);
    world_give(driver_world, driver_self, heap->device, size);
    world_unlock(driver_world);
  }
  own(NULL, address, size);
  heap_vacate(address, size);
  heap->reserved -= size;
}

static bool may_grow(const struct heap *heap, uint64_t size) { return heap->limit == 0 || heap->reserved + size <= heap->limit; }

static struct chunk *new_chunk(struct heap *heap, uint64_t size) {
  uint64_t address = may_grow(heap, size) ? heap_address(size, PAGE) : 0;
  if (!back(heap, address, size)) return NULL;
  struct chunk *chunk = calloc(1, sizeof *chunk);
  *chunk = (struct chunk){.address = address, .size = size, .heap = heap, .next = heap->chunks};
  chunk->first = new_block(chunk, address, size, NULL);
  own(chunk, address, size);
  heap->chunks = chunk;
  return chunk;
}

static void drop_chunk(struct chunk *chunk) {
  struct heap *heap = chunk->heap;
  for (struct chunk **c = &heap->chunks; *c != NULL; c = &(*c)->next)
    if (*c == chunk) {
      *c = chunk->next;
      break;
    }
  unback(heap, chunk->address, chunk->size);
  for (struct block *b = chunk->first, *after; b != NULL; b = after) {
    after = b->after;
    free(b);
  }
  free(chunk);
}

/* A freed piece may be used again where its freeing has happened: in its lane's order, or by now. */
static bool available(const struct block *block, uint32_t lane) {
  return !block->used && (block->mark == 0 || block->lane == lane || driver_self->lanes[block->lane].retired >= block->mark);
}

static struct block *fit(struct heap *heap, uint64_t size, uint32_t lane) {
  struct block *best = NULL;
  for (struct chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next)
    for (struct block *b = chunk->whole ? NULL : chunk->first; b != NULL; b = b->after)
      if (b->size >= size && (best == NULL || b->size < best->size) && available(b, lane)) best = b;
  return best;
}

static struct block *last_of(const struct chunk *chunk) {
  struct block *block = chunk->first;
  while (block->after != NULL) block = block->after;
  return block;
}

/* What is free at the end of a chunk, with as much behind it as is missing: what a pool hands out may span its chunks. */
static struct block *extended(struct heap *heap, uint64_t size, uint32_t lane) {
  for (struct chunk *chunk = heap->chunks; chunk != NULL; chunk = chunk->next) {
    struct block *last = last_of(chunk);
    if (!available(last, lane)) continue;
    uint64_t more = up(size - last->size, heap->chunk_size), end = chunk->address + chunk->size;
    if (!may_grow(heap, more) || !back(heap, take(more, PAGE, end), more)) continue;
    own(chunk, end, more);
    chunk->size += more;
    last->size += more;
    return last;
  }
  return NULL;
}

struct block *heap_allocate(struct heap *heap, uint64_t bytes, uint32_t lane) {
  uint64_t size = up(bytes, UNIT);
  if (size < bytes || (heap->device != HEAP_HOST && size > driver_world->devices[heap->device].memory)) return NULL;
  bool whole = !heap->pooled && size > SMALL;
  struct block *block = whole ? NULL : fit(heap, size, lane);
  if (block == NULL && heap->pooled) block = extended(heap, size, lane);
  if (block == NULL) {
    struct chunk *chunk = new_chunk(heap, up(size, heap->chunk_size));
    if (chunk == NULL) return NULL;
    chunk->whole = whole;
    block = chunk->first;
  }
  if (block->size > size) {
    struct block *rest = new_block(block->chunk, block->address + size, block->size - size, block);
    rest->lane = block->lane;
    rest->mark = block->mark;
    block->size = size;
  }
  block->used = true;
  block->mark = 0;
  block->chain = *bucket(block->address);
  *bucket(block->address) = block;
  heap->used += block->size;
  if (heap->used > heap->used_high) heap->used_high = heap->used;
  return block;
}

/* Both lie side by side, and may be used again on the same condition. */
static void join(struct block *block) {
  struct block *after = block->after;
  if (after == NULL || block->used || after->used || block->lane != after->lane || block->mark != after->mark) return;
  block->size += after->size;
  block->after = after->after;
  if (block->after != NULL) block->after->before = block;
  free(after);
}

/* What is free for all need not remember since when. */
static void settle(struct block *block) {
  if (block == NULL || block->used || !available(block, WORLD_LANES)) return;
  block->lane = 0;
  block->mark = 0;
}

void heap_free(struct block *block, uint32_t lane, uint64_t mark) {
  struct block **b = bucket(block->address);
  while (*b != block) b = &(*b)->chain;
  *b = block->chain;
  struct heap *heap = block->chunk->heap;
  struct chunk *chunk = block->chunk;
  heap->used -= block->size;
  block->used = block->managed = false;
  block->lane = lane;
  block->mark = mark;
  settle(block);
  settle(block->before);
  settle(block->after);
  join(block);
  if (block->before != NULL) join(block->before);
  if (!heap->pooled && chunk->first->after == NULL && !chunk->first->used) drop_chunk(chunk);
}

struct block *heap_find(uint64_t address) {
  struct block *block = *bucket(address);
  while (block != NULL && block->address != address) block = block->chain;
  return block;
}

struct block *heap_containing(uint64_t address) {
  struct chunk *chunk = owner_of(address);
  struct block *block = chunk != NULL ? chunk->first : NULL;
  while (block != NULL && address - block->address >= block->size) block = block->after;
  return block != NULL && block->used ? block : NULL;
}

/* Gives back a piece of the size by which chunks grow at the end of one, which goes with the last of them. */
static bool shrink(struct chunk *chunk) {
  struct block *last = last_of(chunk);
  uint64_t piece = chunk->heap->chunk_size;
  if (!available(last, WORLD_LANES) || last->size < piece) return false;
  if (chunk->size == piece) {
    drop_chunk(chunk);
    return false;
  }
  chunk->size -= piece;
  last->size -= piece;
  unback(chunk->heap, chunk->address + chunk->size, piece);
  if (last->size == 0) {
    last->before->after = NULL;
    free(last);
  }
  return true;
}

void heap_trim(struct heap *heap, uint64_t keep) {
  for (struct chunk *chunk = heap->chunks, *next; chunk != NULL && heap->reserved > keep; chunk = next) {
    next = chunk->next;
    for (struct block *b = chunk->first; b != NULL; b = b->after) settle(b);
    for (struct block *b = chunk->first; b != NULL; b = b->after)
      while (b->after != NULL && !b->used && !b->after->used && b->lane == b->after->lane && b->mark == b->after->mark) join(b);
    while (heap->reserved > keep && shrink(chunk)) continue;
  }
}

void heap_clear(struct heap *heap) {
  while (heap->chunks != NULL) {
    struct block *block = heap->chunks->first;
    while (block->after != NULL && !block->used) block = block->after;
    if (block->used)
      heap_free(block, 0, 0);
    else
      drop_chunk(heap->chunks);
  }
}
