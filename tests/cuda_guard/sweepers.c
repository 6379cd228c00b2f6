/* Two threads sweep at once, again and again, while a dead process's slot holds memory. Ends with 1 if the counter is wrong then.
 *
 *   sweepers PAGE */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger.h"

enum { ROUNDS = 20, OWN = 1000, OTHERS = 300, BEGUN = 1 };

static struct guard_job *job;
static int file, slot;
static pthread_barrier_t both;

/* A change has begun: another sweeper would begin the same. */
void guard_crash_point(int point) {
  if (point == BEGUN) (void)usleep(1000);
}

static void *sweep(void *nothing) {
  (void)pthread_barrier_wait(&both);
  (void)ledger_sweep(job, file, slot);
  return nothing;
}

int main(int count, char **words) {
  if (count != 2 || (file = open(words[1], O_RDWR)) < 0) return 2;
  job = mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  slot = ledger_claim(job, file, (unsigned)getpid());
  (void)ledger_change(job, (unsigned)slot, 0, OWN, UINT64_MAX);
  (void)pthread_barrier_init(&both, NULL, 2);
  for (int round = 0; round < ROUNDS; round++) {
    pid_t child = fork();
    if (child == 0) {
      int own = ledger_claim(job, file, (unsigned)getpid());
      (void)ledger_change(job, (unsigned)own, 0, OTHERS, UINT64_MAX);
      _exit(0);
    }
    (void)waitpid(child, NULL, 0);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) (void)pthread_create(&threads[i], NULL, sweep, NULL);
    for (int i = 0; i < 2; i++) (void)pthread_join(threads[i], NULL);
    if (ledger_used(job, 0) != OWN) return 1;
  }
  return 0;
}
