/* The job's mapped pages, and the driver library that they name. */
#ifndef MESH_GUARD_PAGES_H
#define MESH_GUARD_PAGES_H

#include <stdbool.h>

#include "page.h"

/* NULL without pages. Set once, before any call of the driver returns. */
extern const struct guard_policy *guard_policy;
extern struct guard_job *guard_job;
extern int guard_job_file;

/* Finds and maps the pages; false, with a line on standard error, on failure. */
bool pages_map(void);

/* Loads the real library from an absolute path; NULL, with a line on standard error, on failure. */
void *pages_open(const char *path);

void pages_say(const char *what, const char *why);

#endif
