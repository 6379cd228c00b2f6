#include "lender.h"

#include "ledger.h"

#define LEAST_WEIGHT (INT64_C(1) << 20)

void share_out(uint32_t count, const int64_t *weights, const int64_t *room, int64_t left, int64_t *given) {
  for (uint32_t i = 0; i < count; i++) given[i] = 0;
  for (uint32_t round = 0; round < count && left > 0; round++) { /* each round fills a job up, or is the last */
    __int128 sum = 0;
    int64_t before = left;
    for (uint32_t i = 0; i < count; i++) sum += given[i] < room[i] ? weights[i] : 0;
    if (sum == 0) return;
    for (uint32_t i = 0; i < count; i++) {
      if (given[i] >= room[i]) continue;
      int64_t part = (int64_t)((__int128)before * weights[i] / sum), most = room[i] - given[i];
      given[i] += part < most ? part : most;
      left -= part < most ? part : most;
    }
    if (left == before) return;
  }
}

static _Atomic uint64_t *in_force(const struct contender *contender) {
  return &contender->policy->allowances[contender->place].memory_limit;
}

static int64_t limit_of(const struct contender *contender) {
  uint64_t limit = atomic_load(in_force(contender));
  return limit > INT64_MAX ? INT64_MAX : (int64_t)limit;
}

/* Returns a job's memory by its page, at most what it can have been allowed. A job that is away has none on the device. */
static int64_t held(const struct contender *contender) {
  uint64_t used = ledger_used(contender->job, contender->place);
  uint64_t bytes = used > INT64_MAX / GUARD_UNIT ? INT64_MAX : used * GUARD_UNIT;
  if (contender->is_away) return 0;
  return bytes < (uint64_t)contender->memory_most ? (int64_t)bytes : contender->memory_most;
}

static int64_t beyond(int64_t a, int64_t b) { return a > b ? a - b : 0; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns what it has of the device, or may have at any moment. */
static int64_t claim(const struct contender *contender) {
  int64_t limit = limit_of(contender), has = held(contender);
  return limit > has ? limit : has;
}

/* Sets what each may have beyond its guarantee: what it has, and a part of the rest; if that is too much, a part of the total. */
static void apportion(const struct arbiter *arbiter, int64_t room, int64_t *lent) {
  int64_t weights[ARBITER_CONTENDERS], has[ARBITER_CONTENDERS], more[ARBITER_CONTENDERS], part[ARBITER_CONTENDERS], sum = 0;
  for (uint32_t i = 0; i < arbiter->count; i++) {
    const struct contender *contender = &arbiter->contenders[i];
    weights[i] = contender->memory > LEAST_WEIGHT ? contender->memory : LEAST_WEIGHT;
    has[i] = beyond(held(contender), contender->memory);
    more[i] = contender->is_away ? 0 : contender->memory_most - contender->memory - has[i];
    sum += has[i];
  }
  if (sum > room) {
    share_out(arbiter->count, weights, has, room, lent);
    return;
  }
  share_out(arbiter->count, weights, more, room - sum, part);
  for (uint32_t i = 0; i < arbiter->count; i++) lent[i] = has[i] + part[i];
}

/* True if no job has the whole device, and its size is known. */
static bool can_be_lent(const struct arbiter *arbiter) {
  for (uint32_t i = 0; i < arbiter->count; i++)
    if (arbiter->contenders[i].memory == ALL_MEMORY) return false;
  return arbiter->memory > 0;
}

bool lend_memory(struct arbiter *arbiter) {
  bool lacks = false;
  int64_t guaranteed = 0, lent[ARBITER_CONTENDERS], wanted[ARBITER_CONTENDERS];
  if (!can_be_lent(arbiter)) {
    for (uint32_t i = 0; i < arbiter->count; i++)
      if (arbiter->contenders[i].memory != ALL_MEMORY) atomic_store(in_force(&arbiter->contenders[i]), (uint64_t)arbiter->contenders[i].memory);
    return false;
  }
  for (uint32_t i = 0; i < arbiter->count; i++) guaranteed += arbiter->contenders[i].memory;
  int64_t cap = (int64_t)((__int128)arbiter->memory * arbiter->cap_ppm / GUARD_PPM);
  int64_t room = beyond(cap, guaranteed + arbiter->memory_foreign);
  apportion(arbiter, room, lent);
  /* First lower limits: what a job got until then is seen below, see memory_change. */
  for (uint32_t i = 0; i < arbiter->count; i++) {
    const struct contender *contender = &arbiter->contenders[i];
    wanted[i] = contender->memory + lent[i];
    if (wanted[i] < limit_of(contender)) atomic_store(in_force(contender), (uint64_t)wanted[i]);
  }
  int64_t left = arbiter->memory;
  for (uint32_t i = 0; i < arbiter->count; i++) {
    left -= claim(&arbiter->contenders[i]);
    room -= beyond(claim(&arbiter->contenders[i]), arbiter->contenders[i].memory);
  }
  for (uint32_t i = 0; i < arbiter->count; i++) { /* guarantees first */
    const struct contender *contender = &arbiter->contenders[i];
    int64_t has = claim(contender), more = least(beyond(contender->memory, has), beyond(left, 0));
    if (limit_of(contender) < contender->memory) atomic_store(in_force(contender), (uint64_t)least(contender->memory, has + more));
    left -= more;
  }
  for (uint32_t i = 0; i < arbiter->count; i++) {
    const struct contender *contender = &arbiter->contenders[i];
    int64_t has = claim(contender), more = least(beyond(wanted[i], has), least(beyond(left, 0), beyond(room, 0)));
    if (limit_of(contender) < contender->memory || wanted[i] <= limit_of(contender)) continue;
    atomic_store(in_force(contender), (uint64_t)least(wanted[i], has + more));
    left -= more;
    room -= more;
  }
  for (uint32_t i = 0; i < arbiter->count; i++) lacks = lacks || limit_of(&arbiter->contenders[i]) < arbiter->contenders[i].memory;
  return lacks;
}

/* True if the jobs have more than the device: one that came back does not fit until others give back what was lent to them. */
static bool is_overfull(const struct arbiter *arbiter) {
  int64_t left = arbiter->memory;
  for (uint32_t i = 0; i < arbiter->count && left >= 0; i++) left -= claim(&arbiter->contenders[i]);
  return can_be_lent(arbiter) && left < 0;
}

bool lend_away(struct arbiter *arbiter, struct contender *contender, bool away) {
  contender->is_away = away;
  (void)lend_memory(arbiter);
  bool fits = away || (held(contender) <= limit_of(contender) && !is_overfull(arbiter));
  if (fits) return true;
  contender->is_away = true;
  (void)lend_memory(arbiter);
  return false;
}
