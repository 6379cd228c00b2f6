/* Writes to the counter of a job's page without end, beside all its places taken by the dead.
 *
 *   hammer PAGE   prints a line once it has begun */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>

#include "page.h"

static struct guard_job *job;

static void *hammer(void *unused) {
  for (uint64_t word = 1;; word = word * UINT64_C(6364136223846793005) + 1) atomic_store(&job->uses[0].memory, word);
  return unused;
}

int main(int count, char **words) {
  int file = count == 2 ? open(words[1], O_RDWR) : -1;
  pthread_t thread;
  job = mmap(NULL, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (job == MAP_FAILED) return 1;
  for (unsigned i = 1; i < GUARD_SLOTS; i++) {
    for (unsigned place = 0; place < GUARD_PLACES; place++) atomic_store(&job->table[i].used[place], 1000);
    atomic_store(&job->table[i].pid, 1);
  }
  if (pthread_create(&thread, NULL, hammer, NULL) != 0) return 1;
  (void)puts("begun");
  (void)fflush(stdout);
  (void)hammer(NULL);
}
