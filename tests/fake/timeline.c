/* What the devices of a world do, and when. It follows from what has been submitted alone, so it is worked out exactly, after
 * the fact, by whoever looks next, whichever process that is.
 *
 * A device runs one process at a time. The process keeps it until it has nothing left that could run, or its slice is over and
 * another one has something; all its lanes run at once and do not slow each other down. */
#include "world.h"

enum { PATIENCE_NS = 50000, GLANCE_NS = 5000 }; /* how often a waiter looks that cannot know its time */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void set(uint64_t *bits, uint32_t i) { bits[i / 64] |= 1ull << i % 64; }

static void unset(uint64_t *bits, uint32_t i) { bits[i / 64] &= ~(1ull << i % 64); }

/* The first bit that is set from `i` on, or one that is not before `end`. */
static uint32_t seek(const uint64_t *bits, uint32_t i, uint32_t end) {
  while (i < end) {
    uint64_t word = bits[i / 64] >> i % 64;
    if (word != 0) return i + (uint32_t)__builtin_ctzll(word);
    i = (i / 64 + 1) * 64;
  }
  return end;
}

#define FOR_BITS(i, bits, from, to) for (uint32_t i = seek(bits, from, to); i < (to); i = seek(bits, i + 1, to))

/* Whether an earlier item holds up the head of a lane because one of both is in the default stream. */
static bool held_by_default(const struct process *process, const struct lane *lane, uint64_t seq) {
  if (lane->kind == LANE_NON_BLOCKING) return false;
  FOR_BITS(i, process->busy, 0, WORLD_LANES) {
    const struct lane *other = &process->lanes[i];
    bool one_default = (other->kind == LANE_LEGACY) != (lane->kind == LANE_LEGACY);
    bool related = other->context == lane->context && other->kind != LANE_NON_BLOCKING && one_default;
    if (related && process->pool[other->head].seq < seq) return true;
  }
  return false;
}

static bool startable(const struct process *process, const struct lane *lane) {
  const struct item *head = &process->pool[lane->head];
  if (head->kind == ITEM_WAIT && process->lanes[head->lane].retired < head->mark) return false;
  return !held_by_default(process, lane, head->seq);
}

static bool runnable(const struct process *process, const struct lane *lane) {
  return process->pool[lane->head].kind != ITEM_HOST && startable(process, lane);
}

static void retire(struct world *world, struct process *process, uint32_t number) {
  struct lane *lane = &process->lanes[number];
  uint32_t done = lane->head;
  struct item *item = &process->pool[done];
  struct stamp *stamp = &process->stamps[item->stamp];
  if (item->kind == ITEM_RECORD && item->seq > stamp->seq)
    *stamp = (struct stamp){.ns = world->now_ns - world->now_ns % world->config.tick_ns, .seq = item->seq};
  lane->head = item->next;
  if (lane->head == 0) {
    unset(process->busy, number);
    if (seek(process->busy, 0, WORLD_LANES) == WORLD_LANES) unset(world->busy, (uint32_t)(process - world->processes));
  }
  lane->retired++;
  world->retired++;
  item->next = process->spare;
  process->spare = done;
  process->items--;
}

/* Retires what takes no more time. Returns how long until that changes of itself, or WORLD_NEVER if nothing is left to run. */
static int64_t settle(struct world *world, uint32_t number, int device) {
  struct process *process = &world->processes[number];
  int64_t next;
  for (bool changed = true; changed;) {
    changed = false;
    next = WORLD_NEVER;
    FOR_BITS(i, process->busy, 0, WORLD_LANES) {
      struct lane *lane = &process->lanes[i];
      if (lane->device != device || !runnable(process, lane)) continue;
      int64_t left = process->pool[lane->head].left_ns;
      next = least(next, left);
      if (left != 0) continue;
      retire(world, process, i);
      changed = true;
    }
  }
  return next;
}

/* Lets the process have the device if it has anything to run, and says for how long. */
static int64_t offer(struct world *world, int number, uint32_t process) {
  struct device *device = &world->devices[number];
  int64_t left = settle(world, process, number);
  if (left == WORLD_NEVER) return WORLD_NEVER;
  device->current = (int)process;
  device->slice_end_ns = world->now_ns + world->config.slice_ns;
  return least(left, world->config.slice_ns);
}

/* Gives the device to whose turn it is, and says how long it will run unchanged. */
static int64_t schedule(struct world *world, int number) {
  const struct device *device = &world->devices[number];
  uint32_t current = (uint32_t)device->current;
  int64_t left = settle(world, current, number);
  if (left != WORLD_NEVER && world->now_ns < device->slice_end_ns) return least(left, device->slice_end_ns - world->now_ns);
  FOR_BITS(i, world->busy, current + 1, WORLD_PROCESSES)
    if ((left = offer(world, number, i)) != WORLD_NEVER) return left;
  FOR_BITS(i, world->busy, 0, current + 1)
    if ((left = offer(world, number, i)) != WORLD_NEVER) return left;
  return WORLD_NEVER;
}

static void run(struct world *world, int number, int64_t step) {
  struct device *device = &world->devices[number];
  struct process *process = &world->processes[device->current];
  FOR_BITS(i, process->busy, 0, WORLD_LANES) {
    struct lane *lane = &process->lanes[i];
    if (lane->device == number && runnable(process, lane)) process->pool[lane->head].left_ns -= step;
  }
  process->executed_ns[number] += step;
  device->busy_ns += step;
}

/* What NVML tells of utilisation: shares of whole periods, of processes that had any. */
static void sample(struct world *world) {
  int64_t period = world->config.sample_ns;
  for (uint32_t d = 0; d < world->config.devices; d++) {
    struct device *device = &world->devices[d];
    device->percent = (uint32_t)((device->busy_ns - device->sampled_ns) * 100 / period);
    device->sampled_ns = device->busy_ns;
    for (uint32_t p = 0; p < world->joined; p++) {
      struct process *process = &world->processes[p];
      int64_t ran = process->executed_ns[d] - process->sampled_ns[d];
      if (ran == 0) continue;
      process->sampled_ns[d] = process->executed_ns[d];
      device->ring[device->samples++ % WORLD_SAMPLES] =
          (struct sample){.ns = world->now_ns, .process = p, .percent = (uint32_t)(ran * 100 / period)};
    }
  }
  world->next_sample_ns = world->now_ns + period;
}

int64_t world_advance(struct world *world, int64_t to_ns) {
  for (;;) {
    int64_t until[WORLD_DEVICES], next;
    uint64_t before;
    do { /* what one device ends may let another go on */
      before = world->retired;
      next = WORLD_NEVER;
      for (uint32_t d = 0; d < world->config.devices; d++) next = least(next, until[d] = schedule(world, (int)d));
    } while (world->config.devices > 1 && world->retired != before);
    if (world->next_sample_ns <= world->now_ns) sample(world);
    int64_t step = least(least(to_ns, world->next_sample_ns) - world->now_ns, next);
    if (world->now_ns >= to_ns) return next;
    for (uint32_t d = 0; d < world->config.devices; d++)
      if (until[d] != WORLD_NEVER) run(world, (int)d, step);
    world->now_ns += step;
  }
}

uint64_t world_submit(struct world *world, struct process *process, uint32_t number, struct item item) {
  struct lane *lane = &process->lanes[number];
  uint32_t depth = world->config.queue_depth;
  while (process->items >= WORLD_ITEMS - 1 || lane->submitted - lane->retired >= depth)
    world_await(world, process, number, lane->retired + depth / 8 + 1); /* some at a time, not to be woken for each */
  uint32_t i = process->spare;
  if (i == 0)
    i = ++process->fresh;
  else
    process->spare = process->pool[i].next;
  process->items++;
  item.next = 0;
  item.seq = ++process->seq;
  process->pool[i] = item;
  if (lane->head == 0)
    lane->head = i;
  else
    process->pool[lane->tail].next = i;
  lane->tail = i;
  set(process->busy, number);
  set(world->busy, (uint32_t)(process - world->processes));
  return ++lane->submitted;
}

bool world_reached(const struct process *process, uint32_t number) {
  const struct lane *lane = &process->lanes[number];
  return lane->head != 0 && process->pool[lane->head].kind == ITEM_HOST && startable(process, lane);
}

void world_returned(struct world *world, struct process *process, uint32_t number) {
  process->pool[process->lanes[number].head].kind = ITEM_WORK;
  world_advance(world, world->now_ns);
  process->bell++;
  world_wake(&process->bell);
}

static int64_t due(const struct process *process, uint32_t number, uint64_t mark, int depth) {
  const struct lane *lane = &process->lanes[number];
  int64_t sum = 0;
  uint64_t at = lane->retired;
  for (uint32_t i = lane->head; i != 0 && at < mark; i = process->pool[i].next, at++) {
    const struct item *item = &process->pool[i];
    int64_t other = item->kind == ITEM_WAIT && depth > 0 ? due(process, item->lane, item->mark, depth - 1) : 0;
    sum = (sum > other ? sum : other) + item->left_ns;
  }
  return sum;
}

int64_t world_due(const struct process *process, uint32_t lane, uint64_t mark) { return due(process, lane, mark, 8); }

void world_await(struct world *world, struct process *process, uint32_t number, uint64_t mark) {
  const struct lane *lane = &process->lanes[number];
  const struct device *device = &world->devices[lane->device];
  while (lane->retired < mark) {
    uint32_t seen = process->bell;
    int64_t left = world_due(process, number, mark), until;
    if (world->config.virtual_ns == 0) {
      int64_t pause = device->current == process - world->processes ? GLANCE_NS : PATIENCE_NS;
      until = world_clock() + (left > pause ? left : pause);
    } else {
      int64_t next = world_advance(world, world_now(world));
      if (next != WORLD_NEVER) {
        world->virtual_ns += next;
        world_advance(world, world_now(world));
        continue;
      }
      until = world_clock() + PATIENCE_NS; /* for the host, whose time is real */
    }
    world_unlock(world);
    world_sleep(&process->bell, seen, until);
    world_lock(world);
  }
}

void world_drop(struct world *world, struct process *process) {
  FOR_BITS(i, process->busy, 0, WORLD_LANES) {
    struct lane *lane = &process->lanes[i];
    lane->head = 0;
    lane->retired = lane->submitted;
    unset(process->busy, i);
  }
  unset(world->busy, (uint32_t)(process - world->processes));
  process->spare = process->fresh = process->items = 0;
}
