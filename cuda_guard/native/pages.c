#define _GNU_SOURCE
#include "pages.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGES "/run/mesh/guard"    /* mount point in containers, which the job cannot change */
#define PAGES_ENV "MESH_GUARD_DIR" /* for jobs without a mount, where the guard is cooperative */
#define FILE_FROM 100              /* programs tend to close low descriptors */
#define FILE_TO 1124

const struct guard_policy *guard_policy;
struct guard_job *guard_job;
int guard_job_file = -1;

void pages_say(const char *what, const char *why) {
  char line[600] = "mesh guard: ";
  strncat(line, what, 300);
  strncat(line, ": ", 3);
  strncat(line, why, 180);
  strncat(line, "; there is no CUDA for this program\n", 40);
  if (write(STDERR_FILENO, line, strlen(line)) < 0) return;
}

/* Finds the job page's descriptor if another library of the guard in this process has one: closing any descriptor of a file releases
 * all of the process's locks on it, and with them its slot. */
static int opened_before(const char *path) {
  struct stat wanted, have;
  if (stat(path, &wanted) != 0) return -1;
  for (int file = FILE_FROM; file < FILE_TO; file++)
    if (fstat(file, &have) == 0 && have.st_dev == wanted.st_dev && have.st_ino == wanted.st_ino) return file;
  return -1;
}

/* Maps a page by its name in `directory`; NULL with errno on failure. */
static void *map(const char *directory, const char *name, size_t size, bool writable, int *file_out) {
  char path[GUARD_PATH + 16];
  size_t length = strlen(directory);
  if (length >= GUARD_PATH) {
    errno = ENAMETOOLONG;
    return NULL;
  }
  memcpy(path, directory, length);
  memcpy(path + length, name, strlen(name) + 1);
  int before = writable ? opened_before(path) : -1;
  int file = before >= 0 ? before : open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (file < 0) return NULL;
  struct stat state;
  void *page = MAP_FAILED;
  if (fstat(file, &state) == 0 && state.st_size >= (off_t)size)
    page = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
  else
    errno = EINVAL;
  if (before >= 0) {
    *file_out = before;
    return page == MAP_FAILED ? NULL : page;
  }
  if (page != MAP_FAILED && writable) {
    *file_out = fcntl(file, F_DUPFD_CLOEXEC, FILE_FROM);
    if (*file_out < 0) *file_out = dup(file);
  }
  int error = errno;
  (void)close(file);
  errno = error;
  return page == MAP_FAILED ? NULL : page;
}

bool pages_map(void) {
  const char *directory = access(PAGES "/policy", F_OK) == 0 ? PAGES : getenv(PAGES_ENV);
  if (directory == NULL) {
    pages_say(PAGES "/policy", strerror(ENOENT));
    return false;
  }
  const struct guard_policy *policy = map(directory, "/policy", sizeof *policy, false, NULL);
  struct guard_job *job = policy == NULL ? NULL : map(directory, "/job", sizeof *job, true, &guard_job_file);
  if (job == NULL) {
    pages_say(directory, strerror(errno));
    return false;
  }
  bool fits = policy->magic == GUARD_MAGIC && policy->layout == GUARD_LAYOUT && policy->devices <= GUARD_DEVICES &&
              job->magic == GUARD_MAGIC && job->layout == GUARD_LAYOUT && job->slots == GUARD_SLOTS &&
              policy->driver[0] == '/' && memchr(policy->driver, 0, GUARD_PATH) != NULL;
  if (!fits) {
    pages_say(directory, "not pages of this guard's layout");
    return false;
  }
  guard_policy = policy;
  guard_job = job;
  return true;
}

void *pages_open(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library != NULL) return library;
  const char *error = dlerror();
  pages_say(path, error == NULL ? "cannot be loaded" : error);
  return NULL;
}
