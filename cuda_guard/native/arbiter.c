#define _GNU_SOURCE
#include "arbiter.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "bucket.h"
#include "lender.h"

#define STEP_NS 1000000       /* step while a job has the turn, or waits for lent memory */
#define HAND_OVER_NS 100000   /* step while no job has it: the device may be idle */
#define QUIET_NS 20000000     /* step otherwise */
#define ACTIVE_NS 20000000    /* a job without launches for this long that waits for nothing is idle */
#define LEAST_PPM 1000        /* smallest share, as a divisor */
#define LATE_NS 4000000       /* delay until the end of a turn is noticed and its work measured */
#define RESERVED_TURNS 2 /* for which a gang keeps a device while it waits for another: until a turn there has surely ended */
#define LONGEST_NS 3600000000000 /* longest plausible work in flight */

static void wake(_Atomic uint32_t *word) { (void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

void policy_set_gate(struct guard_policy *policy, bool closed) {
  uint32_t old = atomic_load(&policy->gate);
  atomic_store(&policy->gate, ((old & ~0xffu) + 0x100) | (closed ? GUARD_GATE_CLOSED : GUARD_GATE_OPEN));
  wake(&policy->gate);
}

void policy_set_rate(struct guard_policy *policy, uint32_t place, uint32_t share_ppm, int64_t burst_ns, int64_t now_ns) {
  struct guard_allowance *allowance = &policy->allowances[place];
  uint32_t index = atomic_load(&allowance->rate_index);
  const struct guard_rate *old = &allowance->rates[index & 1];
  struct guard_rate rate = {.t0_ns = now_ns, .v0_ns = rate_allowed(old, now_ns), .share_ppm = share_ppm, .burst_ns = burst_ns};
  allowance->rates[(index + 1) & 1] = rate;
  atomic_store_explicit(&allowance->rate_index, index + 1, memory_order_release);
  wake(&allowance->rate_index);
}

void policy_set_turn(struct guard_policy *policy, uint32_t place, uint32_t turn) {
  _Atomic uint32_t *word = &policy->allowances[place].turn;
  uint32_t old = atomic_load(word);
  if ((old & GUARD_TURN_MASK) == turn) return;
  atomic_store(word, ((old & ~(uint32_t)GUARD_TURN_MASK) + GUARD_TURN_MASK + 1) | turn);
  wake(word);
}

/* --- state of a job */

static const struct guard_use *use_of(const struct contender *contender) { return &contender->job->uses[contender->place]; }

/* Returns the work in flight by the job's page. The job can write it, so impossible values are clamped. */
static int64_t told_under_way(const struct contender *contender) {
  int64_t sum = 0;
  for (unsigned slot = 1; slot < GUARD_SLOTS; slot++) {
    if (atomic_load(&contender->job->table[slot].pid) == 0) continue;
    int64_t ns = atomic_load(&contender->job->table[slot].under_way[contender->place]);
    if (ns > 0) sum += ns < LONGEST_NS ? ns : LONGEST_NS;
  }
  return sum;
}

/* Returns the work in flight. A process that no longer calls the driver does not see its end, so it counts for a limited time only. */
static int64_t under_way(const struct arbiter *arbiter, const struct contender *contender, int64_t now_ns) {
  int64_t told = told_under_way(contender), launched = atomic_load(&use_of(contender)->last_launch_ns);
  bool possible = launched > 0 && launched <= now_ns && now_ns - launched < told + arbiter->drain_ns;
  return possible ? told : 0;
}

static bool wants(const struct contender *contender) {
  for (unsigned slot = 1; slot < GUARD_SLOTS; slot++)
    if (atomic_load(&contender->job->table[slot].pid) != 0 && atomic_load(&contender->job->table[slot].waiting[contender->place])) return true;
  return false;
}

static bool is_within_allowance(const struct contender *contender, int64_t now_ns) {
  struct guard_rate rate = rate_of(&contender->policy->allowances[contender->place]);
  return bucket_wait(&rate, atomic_load(&use_of(contender)->spent_ns), now_ns) == 0;
}

static bool is_active(const struct contender *contender, int64_t now_ns) { return now_ns - contender->active_ns < ACTIVE_NS; }

/* A job that was idle saves up no turns. */
static void catch_up(struct arbiter *arbiter, struct contender *late, int64_t now_ns) {
  int64_t least = INT64_MAX;
  for (uint32_t i = 0; i < arbiter->count; i++) {
    const struct contender *contender = &arbiter->contenders[i];
    if (contender != late && is_active(contender, now_ns) && contender->virtual_ns < least) least = contender->virtual_ns;
  }
  if (least != INT64_MAX && late->virtual_ns < least) late->virtual_ns = least;
}

/* Charges a job's account: its measured use, at most the time since the last charge. A job that had a turn and reports far less than the
 * turn took pays for the turn. */
static void settle(struct contender *contender, int64_t now_ns) {
  uint64_t busy = atomic_load(&use_of(contender)->busy_ns), told = busy - contender->seen_ns;
  uint32_t share = contender->share_ppm > LEAST_PPM ? contender->share_ppm : LEAST_PPM;
  contender->credible_ns += contender->looked_ns > 0 ? now_ns - contender->looked_ns : 0;
  int64_t had = told < (uint64_t)contender->credible_ns ? (int64_t)told : contender->credible_ns;
  contender->credible_ns -= had;
  contender->looked_ns = now_ns;
  contender->seen_ns = busy;
  if (contender->turn_ns > 0) {
    int64_t held = now_ns - contender->turn_ns, least = had < held / 8 ? held : held - LATE_NS;
    if (had < least) had = least;
    contender->turn_ns = now_ns;
  }
  contender->virtual_ns += (int64_t)((__int128)had * GUARD_PPM / share);
}

static void look(struct arbiter *arbiter, struct contender *contender, int64_t now_ns) {
  if (contender->turn_ns == 0) settle(contender, now_ns);
  int64_t launched = atomic_load(&use_of(contender)->last_launch_ns);
  if (wants(contender) || under_way(arbiter, contender, now_ns) > 0) launched = now_ns;
  if (launched <= contender->active_ns || launched > now_ns) return;
  if (!is_active(contender, now_ns)) catch_up(arbiter, contender, now_ns);
  contender->active_ns = launched;
}

/* --- shares */

/* Lends what the active jobs leave under the cap, in proportion to the shares, to each at most up to its limit. */
static bool lend(struct arbiter *arbiter, int64_t now_ns) {
  int64_t weights[ARBITER_CONTENDERS], room[ARBITER_CONTENDERS], lent[ARBITER_CONTENDERS], left = arbiter->cap_ppm;
  bool any = false;
  for (uint32_t i = 0; i < arbiter->count; i++) {
    const struct contender *contender = &arbiter->contenders[i];
    bool active = is_active(contender, now_ns), more = active && contender->limit_ppm > contender->share_ppm;
    weights[i] = contender->share_ppm;
    room[i] = more ? contender->limit_ppm - contender->share_ppm : 0;
    if (active) left -= contender->share_ppm;
  }
  share_out(arbiter->count, weights, room, left, lent);
  for (uint32_t i = 0; i < arbiter->count; i++) {
    struct contender *contender = &arbiter->contenders[i];
    const struct guard_allowance *allowance = &contender->policy->allowances[contender->place];
    uint32_t slope = contender->share_ppm + (uint32_t)lent[i];
    any = any || contender->limit_ppm > contender->share_ppm;
    if (slope != contender->lent_ppm) policy_set_rate(contender->policy, contender->place, slope, rate_of(allowance).burst_ns, now_ns);
    contender->lent_ppm = slope;
  }
  return any;
}

/* --- turns */

static void set_turn(struct arbiter *arbiter, int32_t which, uint32_t turn) {
  struct contender *contender = &arbiter->contenders[which];
  policy_set_turn(contender->policy, contender->place, turn);
}

/* --- gangs */

static int32_t place_on(const struct arbiter *device, const struct guard_policy *policy) {
  for (uint32_t i = 0; i < device->count; i++)
    if (device->contenders[i].policy == policy) return (int32_t)i;
  return -1;
}

/* Calls for the job's other devices, below `number`. */
#define FOR_DEVICES(device, arbiter, policy, below)                                                                  \
  for (struct arbiter *device = (arbiter)->devices; device != NULL && device < (arbiter)->devices + (below); device++) \
    if (device->number != (arbiter)->number && place_on(device, policy) >= 0)

static bool has_turn(const struct arbiter *device, const struct guard_policy *policy) {
  int32_t which = place_on(device, policy);
  const struct contender *contender = &device->contenders[which];
  uint32_t turn = atomic_load(&policy->allowances[contender->place].turn) & GUARD_TURN_MASK;
  return which == device->holder || turn == GUARD_TURN_FREE;
}

static bool has_devices(const struct arbiter *arbiter, const struct guard_policy *policy, uint32_t below) {
  FOR_DEVICES(device, arbiter, policy, below) {
    if (!has_turn(device, policy)) return false;
  }
  return true;
}

/* A gang that has no time left on one of its devices can use none of them. */
static bool may_go(const struct arbiter *arbiter, const struct contender *contender, int64_t now_ns) {
  if (!is_within_allowance(contender, now_ns)) return false;
  FOR_DEVICES(device, arbiter, contender->policy, GUARD_DEVICES) {
    if (!is_within_allowance(&device->contenders[place_on(device, contender->policy)], now_ns)) return false;
  }
  return true;
}

/* True while the last work on a device that the gang waits for ends: then it may be the gang's next. */
static bool is_near(const struct arbiter *arbiter, const struct contender *contender) {
  FOR_DEVICES(device, arbiter, contender->policy, GUARD_DEVICES) {
    if (device->draining >= 0) return true;
  }
  return false;
}

static bool wants_anywhere(const struct arbiter *arbiter, const struct contender *contender) {
  if (wants(contender)) return true;
  FOR_DEVICES(device, arbiter, contender->policy, GUARD_DEVICES) {
    if (wants(&device->contenders[place_on(device, contender->policy)])) return true;
  }
  return false;
}

static bool is_idle(const struct arbiter *arbiter, const struct contender *contender, int64_t now_ns) {
  int64_t launched = atomic_load(&use_of(contender)->last_launch_ns);
  return under_way(arbiter, contender, now_ns) == 0 && now_ns - (launched > arbiter->began_ns ? launched : arbiter->began_ns) > arbiter->idle_ns;
}

static bool is_over(const struct arbiter *arbiter, int64_t now_ns) {
  const struct contender *holder = &arbiter->contenders[arbiter->holder];
  int64_t held = now_ns - arbiter->began_ns;
  if (!may_go(arbiter, holder, now_ns)) return true;
  if (!has_devices(arbiter, holder->policy, GUARD_DEVICES))
    return !wants_anywhere(arbiter, holder) || (held >= RESERVED_TURNS * arbiter->turn_ns && !is_near(arbiter, holder));
  if (held >= arbiter->turn_ns) return true;
  if (!is_idle(arbiter, holder, now_ns)) return false;
  FOR_DEVICES(device, arbiter, holder->policy, GUARD_DEVICES) {
    if (device->holder >= 0 && !is_idle(device, &device->contenders[device->holder], now_ns)) return false;
  }
  return true;
}

/* True if its last work has ended, by its own report or after the limit for a job that does not report. */
static bool is_drained(const struct arbiter *arbiter, int64_t now_ns) {
  const struct contender *contender = &arbiter->contenders[arbiter->draining];
  int64_t since = now_ns - arbiter->began_ns;
  if (since > arbiter->drain_ns) return true;
  return under_way(arbiter, contender, now_ns) == 0 && (wants(contender) || since > arbiter->idle_ns);
}

/* Returns the job with the next turn; -1 if none wants it and may have it. */
static int32_t next_in_turn(const struct arbiter *arbiter, int64_t now_ns) {
  int32_t next = -1;
  for (uint32_t i = 0; i < arbiter->count; i++) {
    const struct contender *contender = &arbiter->contenders[i];
    bool wanted = wants_anywhere(arbiter, contender) || ((int32_t)i == arbiter->holder && under_way(arbiter, contender, now_ns) > 0);
    if (!wanted || !may_go(arbiter, contender, now_ns) || !has_devices(arbiter, contender->policy, arbiter->number)) continue;
    if (next < 0 || contender->virtual_ns < arbiter->contenders[next].virtual_ns) next = (int32_t)i;
  }
  return next;
}

static void end_turn(struct arbiter *arbiter, int64_t now_ns) {
  set_turn(arbiter, arbiter->holder, GUARD_TURN_WAIT);
  arbiter->draining = arbiter->holder;
  arbiter->holder = -1;
  arbiter->began_ns = now_ns;
}

static void begin_turn(struct arbiter *arbiter, int64_t now_ns) {
  if (arbiter->holder < 0) return;
  settle(&arbiter->contenders[arbiter->holder], now_ns); /* for the time for which it was reserved */
  arbiter->began_ns = arbiter->contenders[arbiter->holder].turn_ns = now_ns;
  set_turn(arbiter, arbiter->holder, GUARD_TURN_GO);
}

static void take_turns(struct arbiter *arbiter, int64_t now_ns) {
  for (uint32_t i = 0; i < arbiter->count; i++)
    if ((int32_t)i != arbiter->holder) set_turn(arbiter, (int32_t)i, GUARD_TURN_WAIT);
  if (arbiter->holder >= 0 && is_over(arbiter, now_ns)) {
    const struct guard_policy *policy = arbiter->contenders[arbiter->holder].policy;
    settle(&arbiter->contenders[arbiter->holder], now_ns);
    int32_t next = next_in_turn(arbiter, now_ns);
    if (next == arbiter->holder) {
      arbiter->began_ns = now_ns;
      return;
    }
    end_turn(arbiter, now_ns);
    FOR_DEVICES(device, arbiter, policy, GUARD_DEVICES) {
      if (device->holder >= 0 && device->holder == place_on(device, policy)) end_turn(device, now_ns);
    }
  }
  if (arbiter->draining >= 0 && is_drained(arbiter, now_ns)) {
    settle(&arbiter->contenders[arbiter->draining], now_ns);
    arbiter->contenders[arbiter->draining].turn_ns = 0;
    arbiter->draining = -1;
  }
  if (arbiter->holder >= 0 || arbiter->draining >= 0) return;
  arbiter->holder = next_in_turn(arbiter, now_ns);
  if (arbiter->holder < 0) return;
  const struct guard_policy *policy = arbiter->contenders[arbiter->holder].policy;
  arbiter->began_ns = arbiter->contenders[arbiter->holder].turn_ns = now_ns;
  bool goes = has_devices(arbiter, policy, GUARD_DEVICES);
  if (goes) begin_turn(arbiter, now_ns);
  FOR_DEVICES(device, arbiter, policy, GUARD_DEVICES) {
    if (device->holder != place_on(device, policy)) continue;
    device->began_ns = now_ns; /* it is one device nearer to its turn */
    if (goes) begin_turn(device, now_ns);
  }
}

int64_t arbiter_step(struct arbiter *arbiter, int64_t now_ns) {
  uint32_t active = 0;
  for (uint32_t i = 0; i < arbiter->count; i++) {
    look(arbiter, &arbiter->contenders[i], now_ns);
    active += is_active(&arbiter->contenders[i], now_ns);
    atomic_store(&arbiter->contenders[i].policy->heartbeat_ns, now_ns);
  }
  bool elastic = lend(arbiter, now_ns);
  bool lacks = lend_memory(arbiter);
  if (active > 0 && arbiter->count > 1) { /* also those who are idle wait for their turn, so that nobody begins in another's */
    take_turns(arbiter, now_ns);
    return now_ns + (arbiter->holder < 0 ? HAND_OVER_NS : STEP_NS);
  }
  for (uint32_t i = 0; i < arbiter->count; i++) {
    arbiter->contenders[i].turn_ns = 0;
    set_turn(arbiter, (int32_t)i, GUARD_TURN_FREE);
  }
  arbiter->holder = arbiter->draining = -1;
  return now_ns + (lacks || (active > 0 && elastic) ? STEP_NS : QUIET_NS);
}
