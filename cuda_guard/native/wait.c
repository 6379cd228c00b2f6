#define _GNU_SOURCE
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"

#define LOOK_NS 50000000 /* longest sleep between checks: a wake-up may be lost with the daemon */

#ifndef GUARD_CLOCK
void futex_wait(const _Atomic uint32_t *word, uint32_t seen, int64_t deadline_ns) {
  int64_t left = deadline_ns - now_ns();
  if (left <= 0) return;
  if (left > LOOK_NS) left = LOOK_NS;
  struct timespec span = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
  (void)syscall(SYS_futex, word, FUTEX_WAIT, seen, &span, NULL, 0);
}
#endif

void guard_wait(void) {
  for (;;) {
    uint32_t seen = atomic_load_explicit(guard_gate, memory_order_acquire);
    if (!(seen & GUARD_GATE_CLOSED)) return;
    futex_wait(guard_gate, seen, INT64_MAX);
  }
}
