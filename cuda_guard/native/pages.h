/* The job's pages, mapped, and the library that they name. */
#ifndef MESH_GUARD_PAGES_H
#define MESH_GUARD_PAGES_H

#include <stdbool.h>

#include "page.h"

/* NULL while there are none. Set once, before any call of the driver returns. */
extern const struct guard_policy *guard_policy;
extern struct guard_job *guard_job;
extern int guard_job_file;

/* Finds and maps them; false, with a line on the standard error, if that cannot be. */
bool pages_map(void);

/* The real library at an absolute path; NULL, with a line, if it cannot be loaded. */
void *pages_open(const char *path);

void pages_say(const char *what, const char *why);

#endif
