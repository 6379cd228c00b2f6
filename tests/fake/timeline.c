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

static bool on_device(const struct item *item) { return item->kind == ITEM_WORK || item->kind == ITEM_GANG; }

static bool needs_no_turn(const struct item *item) {
  return item->kind == ITEM_IN || item->kind == ITEM_OUT || (item->kind == ITEM_RECORD && item->left_ns > 0);
}

static void retire(struct world *world, struct process *process, uint32_t number) {
  struct lane *lane = &process->lanes[number];
  uint32_t done = lane->head;
  struct item *item = &process->pool[done];
  struct stamp *stamp = &process->stamps[item->stamp];
  if (item->kind == ITEM_RECORD && item->seq > stamp->seq)
    *stamp = (struct stamp){.ns = world->now_ns - world->now_ns % world->config.tick_ns, .seq = item->seq};
  if (item->kind == ITEM_IN || item->kind == ITEM_OUT) world->aside--;
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

/* A rank is done with a collective when its gang has begun the next one. */
static bool is_done(const struct world *world, const struct item *item) {
  return item->kind == ITEM_GANG ? item->mark < world->gangs[item->lane].round : item->left_ns == 0;
}

/* Retires what takes no more time. Returns whether the process has work left that could run on the device now. */
static bool settle(struct world *world, uint32_t number, int device) {
  struct process *process = &world->processes[number];
  bool works = false;
  for (bool changed = true; changed;) {
    changed = works = false;
    FOR_BITS(i, process->busy, 0, WORLD_LANES) {
      struct lane *lane = &process->lanes[i];
      if (lane->device != device || !runnable(process, lane)) continue;
      const struct item *item = &process->pool[lane->head];
      if (is_done(world, item)) {
        retire(world, process, i);
        changed = true;
      } else {
        works |= on_device(item);
      }
    }
  }
  return works;
}

/* Gives the device to whose turn it is. Returns whether anybody works on it. */
static bool schedule(struct world *world, int number) {
  struct device *device = &world->devices[number];
  uint32_t current = (uint32_t)device->current;
  if (settle(world, current, number) && world->now_ns < device->slice_end_ns) return true;
  for (uint32_t n = 0; n < 2; n++) /* first those after the current one */
    FOR_BITS(i, world->busy, n == 0 ? current + 1 : 0, n == 0 ? WORLD_PROCESSES : current + 1) {
      if (!settle(world, i, number)) continue;
      device->current = (int)i;
      device->slice_end_ns = world->now_ns + world->config.slice_ns;
      return true;
    }
  return false;
}

/* The work that runs on a device at this moment. */
struct crew {
  uint32_t count;
  uint64_t wanted_ppm; /* of the device, by all together */
  struct {
    struct item *item;
    uint64_t part_ppm; /* the most that it may have */
  } at[WORLD_LANES];
};
static _Thread_local struct crew crews[WORLD_DEVICES]; /* none where nobody works */

static void muster(struct world *world, int number, bool works) {
  struct crew *crew = &crews[number];
  struct process *process = &world->processes[world->devices[number].current];
  crew->count = 0;
  crew->wanted_ppm = 0;
  if (!works) return;
  FOR_BITS(i, process->busy, 0, WORLD_LANES) {
    const struct lane *lane = &process->lanes[i];
    struct item *item = &process->pool[lane->head];
    if (lane->device != number || !on_device(item) || !runnable(process, lane)) continue;
    crew->at[crew->count].item = item;
    crew->at[crew->count++].part_ppm = lane->part_ppm;
    crew->wanted_ppm += item->width_ppm < lane->part_ppm ? item->width_ppm : lane->part_ppm;
  }
}

/* How fast work runs: beside other work that together wants more than there is, all slow down alike. */
static uint64_t pace_ppm(const struct world *world, int number, uint32_t i) {
  const struct crew *crew = &crews[number];
  uint64_t pace = world->devices[number].clock_ppm, width = crew->at[i].item->width_ppm;
  if (width > crew->at[i].part_ppm) pace = pace * crew->at[i].part_ppm / width;
  return crew->wanted_ppm > WORLD_WHOLE ? pace * WORLD_WHOLE / crew->wanted_ppm : pace;
}

static struct gang *gang_of(struct world *world, const struct item *item) {
  return item->kind == ITEM_GANG ? &world->gangs[item->lane] : NULL;
}

/* Counts whose ranks all run now: they alone go on, the others spin. */
static void assemble(struct world *world) {
  for (uint32_t g = 0; g < world->gang_count; g++) world->gangs[g].running = 0;
  for (uint32_t d = 0; d < world->config.devices; d++)
    for (uint32_t i = 0; i < crews[d].count; i++) {
      struct item *item = crews[d].at[i].item;
      struct gang *gang = gang_of(world, item);
      if (gang == NULL || item->mark != gang->round) continue;
      if (gang->running++ == 0 && item->left_ns > gang->left_ns) gang->left_ns = item->left_ns;
      item->left_ns = 0; /* it is the round's from now on */
    }
}

static int64_t needs_ns(int64_t left_ns, uint64_t pace) { return (int64_t)(((uint64_t)left_ns * WORLD_WHOLE + pace - 1) / pace); }

static int64_t after(int64_t left_ns, int64_t step, uint64_t pace) {
  int64_t done = (int64_t)((uint64_t)step * pace / WORLD_WHOLE);
  return done < left_ns ? left_ns - done : 0;
}

/* How long the device works unchanged. */
static int64_t steady(struct world *world, int number) {
  int64_t next = world->devices[number].slice_end_ns - world->now_ns;
  for (uint32_t i = 0; i < crews[number].count; i++) {
    const struct item *item = crews[number].at[i].item;
    const struct gang *gang = gang_of(world, item);
    if (gang != NULL && (gang->running < gang->ranks || item->mark != gang->round)) continue;
    next = least(next, needs_ns(gang != NULL ? gang->left_ns : item->left_ns, pace_ppm(world, number, i)));
  }
  return next;
}

static void count_slots(const struct world *world, struct slots *slots, int64_t step) {
  int64_t slot_ns = world->config.traits.slot_ns;
  if (slot_ns == 0) return;
  int64_t first = world->now_ns / slot_ns, last = (world->now_ns + step - 1) / slot_ns;
  if (first < slots->next) first = slots->next;
  if (last < first) return;
  slots->count += (uint32_t)(last - first + 1);
  slots->next = last + 1;
}

static void run(struct world *world, int number, int64_t step) {
  struct device *device = &world->devices[number];
  struct process *owner = &world->processes[device->current];
  for (uint32_t i = 0; i < crews[number].count; i++) {
    struct item *item = crews[number].at[i].item;
    if (item->kind == ITEM_WORK) item->left_ns = after(item->left_ns, step, pace_ppm(world, number, i));
  }
  owner->executed_ns[number] += step;
  owner->last_ns[number] = world->now_ns + step;
  device->busy_ns += step;
  count_slots(world, &owner->slots[number], step);
  count_slots(world, &device->slots, step);
}

/* A round goes at the pace of its gang's slowest rank. */
static void run_gangs(struct world *world, int64_t step) {
  uint64_t pace[WORLD_GANGS];
  for (uint32_t g = 0; g < world->gang_count; g++) pace[g] = WORLD_WHOLE;
  for (uint32_t d = 0; d < world->config.devices; d++)
    for (uint32_t i = 0; i < crews[d].count; i++) {
      const struct item *item = crews[d].at[i].item;
      uint64_t own = pace_ppm(world, (int)d, i);
      if (item->kind == ITEM_GANG && own < pace[item->lane]) pace[item->lane] = own;
    }
  for (uint32_t g = 0; g < world->gang_count; g++) {
    struct gang *gang = &world->gangs[g];
    if (gang->running < gang->ranks) continue;
    gang->left_ns = after(gang->left_ns, step, pace[g]);
    gang->round += gang->left_ns == 0;
  }
}

/* Copies and records, which go on whosever turn it is. The copies of a device that go one way share its link. With `step` 0,
 * returns how long they go on unchanged. */
static int64_t aside(struct world *world, int64_t step) {
  uint32_t copies[2][WORLD_DEVICES] = {{0}};
  int64_t next = WORLD_NEVER;
  if (world->aside == 0) return next;
  for (int pass = 0; pass < 2; pass++)
    FOR_BITS(p, world->busy, 0, WORLD_PROCESSES) {
      struct process *process = &world->processes[p];
      FOR_BITS(i, process->busy, 0, WORLD_LANES) {
        const struct lane *lane = &process->lanes[i];
        struct item *item = &process->pool[lane->head];
        if (!needs_no_turn(item) || !startable(process, lane)) continue;
        uint32_t *link = item->kind == ITEM_RECORD ? NULL : &copies[item->kind == ITEM_IN][lane->device];
        if (pass == 0) {
          if (link != NULL) ++*link;
          continue;
        }
        uint64_t pace = link != NULL ? WORLD_WHOLE / *link : WORLD_WHOLE;
        if (step == 0) {
          next = least(next, needs_ns(item->left_ns, pace));
          continue;
        }
        item->left_ns = after(item->left_ns, step, pace);
        if (item->left_ns > 0) continue;
        if (item->kind == ITEM_RECORD) world->aside--; /* a marker from now on */
      }
    }
  for (uint32_t d = 0; d < world->config.devices && step > 0; d++)
    if (copies[0][d] + copies[1][d] > 0) world->devices[d].copied_ns += step;
  return next;
}

/* Copies that have ended. */
static void end_copies(struct world *world) {
  if (world->aside == 0) return;
  FOR_BITS(p, world->busy, 0, WORLD_PROCESSES) {
    struct process *process = &world->processes[p];
    FOR_BITS(i, process->busy, 0, WORLD_LANES) {
      const struct lane *lane = &process->lanes[i];
      while (lane->head != 0) {
        const struct item *item = &process->pool[lane->head];
        if ((item->kind != ITEM_IN && item->kind != ITEM_OUT) || item->left_ns > 0 || !startable(process, lane)) break;
        retire(world, process, i);
      }
    }
  }
}

/* What NVML tells of utilisation: shares of whole periods, of processes that had any; by slots, one period late. */
static uint32_t told(const struct world *world, int64_t ran_ns, struct slots *slots) {
  int64_t period = world->config.sample_ns, slot_ns = world->config.traits.slot_ns;
  if (slot_ns == 0) return (uint32_t)(ran_ns * 100 / period);
  uint32_t late = slots->coming, percent = (uint32_t)(slots->count * slot_ns * 100 / period);
  slots->coming = percent < 100 ? percent : 100;
  slots->count = 0;
  return late;
}

static void sample(struct world *world) {
  for (uint32_t d = 0; d < world->config.devices; d++) {
    struct device *device = &world->devices[d];
    device->percent = told(world, device->busy_ns - device->sampled_ns, &device->slots);
    device->sampled_ns = device->busy_ns;
    for (uint32_t p = 0; p < world->joined; p++) {
      struct process *process = &world->processes[p];
      int64_t ran = process->executed_ns[d] - process->sampled_ns[d];
      if (ran == 0 && process->slots[d].coming == 0) continue;
      process->sampled_ns[d] = process->executed_ns[d];
      device->ring[device->samples++ % WORLD_SAMPLES] =
          (struct sample){.ns = world->now_ns, .process = p, .percent = told(world, ran, &process->slots[d])};
    }
  }
  world->next_sample_ns = world->now_ns + world->config.sample_ns;
}

static void change_clocks(struct world *world) {
  int64_t period = world->now_ns / world->config.traits.clock_ns;
  for (uint32_t d = 0; d < world->config.devices; d++)
    if (world->devices[d].locked_ppm == 0) world->devices[d].clock_ppm = world_clock_ppm(world, (int)d, period);
  world->next_clock_ns = (period + 1) * world->config.traits.clock_ns;
}

int64_t world_advance(struct world *world, int64_t to_ns) {
  for (;;) {
    bool works[WORLD_DEVICES];
    uint64_t before;
    do { /* what one device ends may let another go on */
      before = world->retired;
      end_copies(world);
      for (uint32_t d = 0; d < world->config.devices; d++) works[d] = schedule(world, (int)d);
    } while ((world->config.devices > 1 || world->aside > 0) && world->retired != before);
    if (world->next_sample_ns <= world->now_ns) sample(world);
    if (world->next_clock_ns <= world->now_ns) change_clocks(world);
    for (uint32_t d = 0; d < world->config.devices; d++) muster(world, (int)d, works[d]);
    if (world->gang_count > 0) assemble(world);
    int64_t next = aside(world, 0);
    for (uint32_t d = 0; d < world->config.devices; d++)
      if (works[d]) next = least(next, steady(world, (int)d));
    if (world->now_ns >= to_ns) return next;
    int64_t step = least(least(to_ns, least(world->next_sample_ns, world->next_clock_ns)) - world->now_ns, next);
    for (uint32_t d = 0; d < world->config.devices; d++)
      if (works[d]) run(world, (int)d, step);
    if (world->gang_count > 0) run_gangs(world, step);
    if (step > 0) (void)aside(world, step);
    world->now_ns += step;
  }
}

static bool is_broken(const struct world *world, const struct gang *gang) {
  for (uint32_t r = 0; r < gang->known; r++)
    if (!world->processes[gang->rank[r].process].alive) return true;
  return false;
}

bool world_gather(struct world *world, struct process *process, int device, uint32_t key, uint32_t ranks, struct item *item) {
  uint32_t g = 0, r = 0, number = (uint32_t)(process - world->processes);
  while (g < world->gang_count && (world->gangs[g].key != key || world->gangs[g].ranks != ranks)) g++;
  if (g == WORLD_GANGS || ranks > WORLD_RANKS) return false;
  struct gang *gang = &world->gangs[g];
  if (g == world->gang_count) world->gang_count++;
  if (gang->known == gang->ranks) world_reap(world);
  if (gang->ranks == 0 || is_broken(world, gang)) *gang = (struct gang){.key = key, .ranks = ranks}; /* a new one of this key */
  while (r < gang->known && (gang->rank[r].process != number || gang->rank[r].device != (uint32_t)device)) r++;
  if (r == ranks) return false; /* all its ranks are others */
  if (r == gang->known) {
    gang->known++;
    gang->rank[r].process = number;
    gang->rank[r].device = (uint32_t)device;
  }
  item->kind = ITEM_GANG;
  item->lane = (uint16_t)g;
  item->mark = gang->rank[r].launched++;
  return true;
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
  world->aside += needs_no_turn(&item);
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
    for (uint32_t at = lane->head; at != 0; at = process->pool[at].next) world->aside -= needs_no_turn(&process->pool[at]);
    lane->head = 0;
    lane->retired = lane->submitted;
    unset(process->busy, i);
  }
  unset(world->busy, (uint32_t)(process - world->processes));
  process->spare = process->fresh = process->items = 0;
}
