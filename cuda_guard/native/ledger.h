/* Ledger of a job's memory: one counter per place (a device, or GUARD_HOST) for all its processes, and each process's part of it.
 *
 * A change is one compare-and-swap, so two processes cannot both exceed the limit. The counter's word also names the slot that changed it
 * last and the number of that change; before another process overwrites the word it records that number in the first one's slot. So
 * whatever instruction a process was killed at, it is known whether its last change took effect, and a sweep releases exactly what it
 * held (a detectable compare-and-swap: Attiya, Ben-Baruch and Hendler, PODC 2018). The only lock between processes is the sweeper's,
 * which the kernel releases if its holder dies; a mutex keeps the threads of a process
 * from sweeping at once. */
#ifndef MESH_GUARD_LEDGER_H
#define MESH_GUARD_LEDGER_H

#include <stdbool.h>

#include "page.h"

/* Converts bytes to units, rounded up. */
static inline uint64_t units_of(uint64_t bytes) { return bytes / GUARD_UNIT + (bytes % GUARD_UNIT != 0); }

/* Returns the units of a place used by the whole job. */
uint64_t ledger_used(const struct guard_job *job, unsigned place);

/* Adds `units` (negative: releases) for the process in `slot`; false if the job would then hold more than `limit` units, or if another
 * process writes to the counter without end. Calls for one slot must not overlap. */
bool ledger_change(struct guard_job *job, unsigned slot, unsigned place, int64_t units, uint64_t limit);

/* Claims a free slot for this process; -1 if all are taken. `file` is the page's, open for reading and writing; it must stay open. */
int ledger_claim(struct guard_job *job, int file, unsigned pid);

/* Claims this slot; false if it is taken. */
bool ledger_claim_slot(struct guard_job *job, int file, unsigned slot, unsigned pid);

/* Releases what dead processes held; returns their number, or -1 if another process does. `slot`: the caller's, or -1. */
int ledger_sweep(struct guard_job *job, int file, int slot);

/* In a forked child. */
void ledger_forked(void);

/* Returns the pid of a slot's process in the caller's namespace; 0 if it is gone (or is the caller). */
unsigned ledger_owner(int file, unsigned slot);

#ifdef GUARD_CRASH_POINTS
void guard_crash_point(int point);
#define CRASH_POINT(n) guard_crash_point(n)
#else
#define CRASH_POINT(n) ((void)0)
#endif

#endif
