/* How much memory a job holds: one counter a place (a device, or GUARD_HOST) for all its processes, and each process's part of it.
 *
 * A change is one compare-and-swap, so two processes cannot both pass the limit. The counter's word also names who changed it last
 * and with which of its changes; whoever is about to write over that first notes it in the other's slot. So of a process that was
 * killed at any instruction it can be told whether its last change took place, and a sweep returns exactly what it held (a
 * detectable compare-and-swap: Attiya, Ben-Baruch and Hendler, PODC 2018). No lock is ever held between processes but the
 * sweeper's, which the kernel lets go of with its holder. */
#ifndef MESH_GUARD_LEDGER_H
#define MESH_GUARD_LEDGER_H

#include <stdbool.h>

#include "page.h"

/* Units for so many bytes, rounded up. */
static inline uint64_t units_of(uint64_t bytes) { return bytes / GUARD_UNIT + (bytes % GUARD_UNIT != 0); }

/* Units of a place in use by the whole job. */
uint64_t ledger_used(const struct guard_job *job, unsigned place);

/* Adds `units` (less than zero: gives back) for the process in `slot`; false if the job would then hold more than `limit` units, or
 * if somebody writes to the counter without end.
 * Not to be called by two threads at once for one slot. */
bool ledger_change(struct guard_job *job, unsigned slot, unsigned place, int64_t units, uint64_t limit);

/* A free slot for this process, or -1 when all are taken. `file` is the page's, open for reading and writing; it must stay open. */
int ledger_claim(struct guard_job *job, int file, unsigned pid);

/* Takes this very slot; false if somebody has it. */
bool ledger_claim_slot(struct guard_job *job, int file, unsigned slot, unsigned pid);

/* Gives back what processes held that are no more; how many there were, or -1 if another is at it. `slot`: the caller's, or -1. */
int ledger_sweep(struct guard_job *job, int file, int slot);

/* The pid of a slot's process in the caller's namespace; 0 if it is gone (or is the caller). */
unsigned ledger_owner(int file, unsigned slot);

#ifdef GUARD_CRASH_POINTS
void guard_crash_point(int point);
#define CRASH_POINT(n) guard_crash_point(n)
#else
#define CRASH_POINT(n) ((void)0)
#endif

#endif
