"""The simulation of one world under one policy and one seed. Departures and submissions are fixed before it starts.

Ranking, filters, choice of replicas, queue order, evacuation plans and the wait before migrating back are the product's own
cores. Leases, terms and gossip appear only as delays (docs/explanation/campus-simulator.md); `sim.protocol` simulates them.
"""

from math import inf
from typing import cast

from mesh.consensus.next_placement import GOES_HOME, WENT_HOME, home_wait_s
from placement.schedule import Cover
from sim.campus.checkpoints import Checkpointer
from sim.campus.churn import DAY_S, Absence, absences, machines
from sim.campus.detection import quantiles_s
from sim.campus.evacuation import Evacuation
from sim.campus.forecast import Forecast
from sim.campus.metrics import BACK_WITHIN_S, RESUMED_WITHIN_S, Counters
from sim.campus.network import Network
from sim.campus.placement import Placement
from sim.campus.policies import Policy, delay_s
from sim.campus.state import Host, Job, fitting
from sim.campus.topology import SERVER, Topology, machine_numbers
from sim.campus.workload import Submission, submissions
from sim.campus.world import World
from sim.kernel import EventLog, Kernel, Streams

GIB = float(1 << 30)
HOUR_S = 3600.0
ALMOST_S = 1e-6
RETRY_HOME_S = 120.0  # between two attempts to return to a machine that is lent but full (own choice)
COVERED = 0.9  # share of noticed departures assumed to lose nothing (own choice)
VACATED = "vacated: its node leaves"


class Campus:
    """One run. `counters` holds the results after `run`."""

    def __init__(self, world: World, policy: Policy, seed: int) -> None:
        self.world, self.policy, self.seed = world, policy, seed
        self.kernel = Kernel()
        self.streams = Streams(seed)
        self.log = EventLog()
        self.end = world.days * DAY_S
        self.counts_from = self.end * world.warm_up
        there = machines(world)
        away = absences(world, there, self.streams)
        self.hosts = [Host(number, machine, away[number]) for number, machine in enumerate(there)]
        self.network = Network(self.kernel)
        self.topology = Topology(world, there, self.network, self.streams)
        self.forecast = Forecast([machine.room for machine in there], world.first_day)
        self.waiting: dict[Job, None] = {}
        self.jobs: list[Job] = []
        self._submissions = iter(submissions(world, self.streams))
        self.placement = Placement(policy, self.kernel, self.hosts, self.forecast)
        self.checkpointer = Checkpointer(
            policy,
            self.kernel,
            world.costs,
            self.topology,
            self.network,
            self.placement,
            self.forecast,
            min(machine.edge_bps for machine in there),
            self._on_reachable,
        )
        self.evacuation = Evacuation(policy, self.kernel, world.costs, self.topology, self.placement, self.checkpointer)
        self.counters = self.checkpointer.counters
        self._rate = self.checkpointer.rate
        self._noticed = self._departed = 0

    def run(self) -> Counters:
        self.begin()
        self.kernel.run(self.end)
        self.close()
        return self.counters

    def begin(self) -> None:
        """Schedule all events that do not depend on the policy."""
        for host in self.hosts:
            self.forecast.lent(host.number, 0.0)
            self._schedule_departure(host)
        self._submit_next()
        self._update_traffic()
        self.kernel.post(self.counts_from, self._begin_to_count)

    # --- the clock

    def _update_traffic(self) -> None:
        self.topology.set_background(self.kernel.now, HOUR_S)
        if self.kernel.now + HOUR_S < self.end:
            self.kernel.post(HOUR_S, self._update_traffic)

    def _begin_to_count(self) -> None:
        """End the warm-up: reset the counters, and leave earlier work and departures out."""
        self.counters = self.checkpointer.counters = Counters()
        now = self.kernel.now
        for job in self.jobs:
            if job.state in {"running", "saving"}:
                # Neither its work up to here nor the loss of that work counts.
                job.began = job.done(now, self._rate) if job.state == "running" else job.saving
            job.allocated = max(job.allocated, now)
            job.noticed = False  # the outcome of an earlier departure does not count

    def close(self) -> None:
        """Settle the counters of everything that is still running."""
        now = self.kernel.now
        for link in self.topology.uplinks:
            link.fall_short(link.short, now)
        for job in self.jobs:
            if job.host is not None:
                self._count_held(job)
            if job.state == "running":
                self._count_work(job, job.done(now, self._rate))
            elif job.state == "saving":
                self._count_work(job, job.saving)

    # --- owners

    def _schedule_departure(self, host: Host) -> None:
        """Schedule the notice and the departure that end the stay beginning now."""
        kernel = self.kernel
        if host.stay >= len(host.absences):
            host.departs_at = inf
            return
        absence = host.absences[host.stay]
        host.departs_at = absence.start
        if absence.kind == "noticed":
            kernel.post(max(0.0, absence.start - absence.notice_s - kernel.now), self._notice, host, absence)
        kernel.post(max(0.0, absence.start - kernel.now), self._leave, host, absence)

    def _notice(self, host: Host, absence: Absence) -> None:
        host.leaving = True
        if self.policy.notice == "ignore":
            return
        now = self.kernel.now
        running = [job for job in host.guests if job.state == "running"]
        for job in [job for job in host.guests if job.state == "starting"]:
            self._count_departure(job, host, None)
            self._stop(job)
            self._requeue_after(job, self.policy.requeue_s)
        host.line = self.evacuation.plan(host, running, absence.start)
        for job in running:
            self.counters.noticed += 1
            self._count_departure(job, host, True)
            self._vacate(job, host, VACATED)
        self.log.add(now, "notice", host.machine.name, len(running))

    def _leave(self, host: Host, absence: Absence) -> None:
        kernel = self.kernel
        now = kernel.now
        self.log.add(now, "leave", host.machine.name, absence.kind, len(host.guests))
        host.lent = host.leaving = False
        host.weight_epoch = -1  # a node publishes new weights at once
        host.stay += 1
        self.forecast.left(host.number, now)
        self._departed += 1
        self._noticed += absence.kind == "noticed"
        self.checkpointer.lossy = Cover(self._departed, COVERED * self._noticed).lossy
        gone = absence.kind != "noticed" or absence.dark
        delay = delay_s(self.policy.detection, quantiles_s(), self.streams.get(host.machine.name, "detection"))
        if gone:
            host.reachable = False
            self._cancel_transfers(host)
            if host.keeps and self.policy.keeps == "peers":
                kernel.post(delay, self.checkpointer.replace_holder, host, host.stay)
        wait = self.policy.requeue_s + (delay if absence.kind != "noticed" else 0.0)
        for job in list(host.guests):
            self._end_attempt(job, host, wait, absence.kind == "noticed")
        host.line, host.sending = [], None
        for job in list(host.buddies):
            self._find_buddy(job)
        kernel.post(max(0.0, absence.end - now), self._return, host)

    def _return(self, host: Host) -> None:
        now = self.kernel.now
        host.lent = host.reachable = True
        host.weight_epoch = -1
        host.free = host.machine.gpus
        self.forecast.lent(host.number, now)
        self.log.add(now, "back", host.machine.name)
        self._schedule_departure(host)
        for job in list(host.displaced):
            if job.state != "done":
                self.counters.could_return += 1
                job.came_back = now
                if self.policy.migrates_back:
                    wait = home_wait_s(self.policy.settle_s, host.id, job.attempts)
                    self.kernel.post(wait, self._migrate_back, job, host, host.stay)
        host.displaced.clear()
        self._start_waiting_jobs()

    # --- submission and placement

    def _submit_next(self) -> None:
        submission = next(self._submissions, None)
        if submission is not None:
            self.kernel.post(max(0.0, submission.at - self.kernel.now), self._submit, submission)

    def _submit(self, submission: Submission) -> None:
        job = Job(submission)
        self.jobs.append(job)
        self.waiting[job] = None
        self._start_waiting_jobs()
        self._submit_next()

    def _start_waiting_jobs(self) -> None:
        """Start all waiting jobs that can start, in queue order."""
        if not self.waiting:
            return
        hopeless: set[tuple[int, int]] = set()
        for job in self.placement.queue_order(self.waiting):
            shape = job.submission.shape
            if shape in hopeless or (job.holders and not any(host.reachable for host in job.holders)):
                continue
            able = self.placement.candidates(job.submission)
            if not able:
                hopeless.add(shape)
                continue
            del self.waiting[job]
            self._start(job, self.placement.choose(job, able))

    def _on_reachable(self, job: Job) -> None:
        if job in self.waiting:
            self._start_waiting_jobs()

    # --- an attempt

    def _start(self, job: Job, host: Host) -> None:
        now = self.kernel.now
        host.free -= job.submission.gpus
        host.guests[job] = None
        job.host = host
        job.epoch += 1
        job.state = "starting"
        job.allocated = now
        job.prefer = None
        self.log.add(now, "start", job.submission.number, host.machine.name)
        self._fetch(job)

    def _fetch(self, job: Job) -> None:
        """Fetch the last checkpoint to the host, unless it is there already."""
        host = job.host
        assert host is not None
        server = self.policy.keeps == "server"
        if job.safe <= 0 or job.safe_here or host in job.holders or self.policy.keeps == "nowhere":
            self._launch(job, job.epoch)
            return
        sources = [holder for holder in job.holders if holder.reachable]
        if not sources and not server:  # all holders left during the transfer
            self._stop(job)
            self._requeue_after(job, 1.0)
            return
        path = self.topology.path(SERVER if server else sources[0].number, (host.number,))
        epoch = job.epoch
        job.fetch = self.network.start(path, job.submission.state_bytes, lambda: self._fetched(job, epoch), False, job)

    def _fetched(self, job: Job, epoch: int) -> None:
        job.fetch = None
        self._launch(job, epoch)

    def _launch(self, job: Job, epoch: int) -> None:
        costs = self.world.costs
        load_s = job.submission.state_bytes / GIB / costs.write_gib_s if job.safe > 0 else 0.0
        self.kernel.post(costs.launch_s + load_s, self._begin, job, epoch)

    def _begin(self, job: Job, epoch: int) -> None:
        if epoch != job.epoch:
            return
        now, counters, host = self.kernel.now, self.counters, job.host
        assert host is not None
        job.state = "running"
        job.base = job.began = job.safe
        job.resumes = job.since = now
        job.safe_here = False
        counters.restoring += (now - job.allocated) * job.submission.gpus
        if job.first_run is None:
            job.first_run = now
            job.origin = host
            counters.started += 1
            counters.waited_s += now - job.submission.at
        if job.stopped is not None:
            down = now - job.stopped
            if job.reason != WENT_HOME:
                counters.downtimes.append(down)
                counters.migrated += job.noticed and job.in_time and down <= RESUMED_WITHIN_S
            job.stopped = None
        job.noticed = job.in_time = False
        if job.came_back is not None and host is job.origin:
            counters.returned += job.came_back >= self.counts_from and now - job.came_back <= BACK_WITHIN_S
            job.came_back = None
        job.note_start(now)
        if self.policy.redundancy is not None:
            self._find_buddy(job)
        self.kernel.post(max(0.0, (job.submission.work_s - job.base) / self._rate), self._finish, job, job.epoch)
        self.checkpointer.schedule(job)

    def _finish(self, job: Job, epoch: int) -> None:
        if epoch != job.epoch:
            return
        now, submission = self.kernel.now, job.submission
        left = submission.work_s - job.done(now, self._rate)
        if left > ALMOST_S:  # checkpoints have delayed it
            self.kernel.post(max(0.0, job.resumes - now) + left / self._rate, self._finish, job, epoch)
            return
        self.log.add(now, "finish", submission.number)
        self._count_work(job, submission.work_s)
        counters = self.counters
        counters.finished += 1
        if 2 <= job.departures <= 4 and job.first_run is not None:
            counters.interrupted_jobs += 1
            counters.interrupted_s += now - job.first_run
            counters.interrupted_work_s += submission.work_s
        self._stop(job)
        job.state = "done"
        self.checkpointer.set_holders(job, ())
        for host in self.hosts if job.departures else ():
            host.displaced.pop(job, None)
        if job.buddy is not None:
            job.buddy.buddies.pop(job, None)
        self._start_waiting_jobs()

    # --- departures with notice, and migrating back

    def _vacate(self, job: Job, host: Host, reason: str, prefer: Host | None = None) -> None:
        """Stop a job, save its state, and send what is not safe yet."""
        now = self.kernel.now
        job.saving = job.done(now, self._rate)
        job.due_late = job.copying = False
        job.stopped = now
        job.state = "saving"
        job.epoch += 1
        job.noticed, job.in_time = reason == VACATED, False
        job.reason, job.prefer = reason, prefer
        if reason != VACATED:
            job.standby, job.first_holder = prefer, None
        job.note_end(WENT_HOME if reason == GOES_HOME else reason, now)
        self._cancel_flows(job)
        save_s = self.evacuation.save_s(job)
        self.counters.stalled += save_s * job.submission.gpus
        if self.policy.notice == "migrate" and job.standby is None and job.first_holder is None:
            job.standby = self.placement.choose_standby(job, host)
        cold = job.standby is not None and job.standby not in job.holders and not job.is_warm(job.standby)
        if cold and job.standby is not None and job.safe > 0 and self.policy.keeps == "peers":
            sources = [holder for holder in job.holders if holder.reachable and holder is not host]
            if sources:  # send the last checkpoint meanwhile, so that only the difference remains
                path = self.topology.path(sources[0].number, (job.standby.number,))
                job.prefetch = self.network.start(
                    path, job.submission.state_bytes, lambda: self._prefetched(job), False, job
                )
        self.kernel.post(save_s, self._send_final_state, job, job.epoch, host)

    def _send_final_state(self, job: Job, epoch: int, host: Host) -> None:
        if epoch != job.epoch:
            return
        if job in host.line:  # one upload at a time, in the order of the plan
            if host.sending is not None and host.sending is not job:
                job.due_late = True
                return
            host.sending = job
        now = self.kernel.now
        job.due_late = False
        targets = () if self.policy.keeps == "server" else self.evacuation.targets(job, host)
        there = machine_numbers(targets)
        count = self.evacuation.final_bytes(job)
        path = self.topology.path(host.number, there)
        job.upload = self.network.start(
            path, count, lambda: self._final_state_stored(job, epoch, host, targets, now), False, job
        )

    def _final_state_stored(self, job: Job, epoch: int, host: Host, targets: tuple[Host, ...], since: float) -> None:
        job.upload = None
        if epoch != job.epoch:
            return
        job.safe = job.saving
        job.in_time = True
        if job.noticed:
            self.counters.saved_in_time += 1
        if (
            job.prefetch is not None and job.standby not in targets
        ):  # it then fetches the whole checkpoint from a holder
            self.network.stop(job.prefetch)
            job.prefetch = None
        holders = tuple(target for target in targets if target is not job.standby or job.prefetch is None)
        self.checkpointer.set_holders(job, holders or targets)
        job.sent_to = machine_numbers(job.holders)
        self._count_work(job, job.saving)
        prefer = job.standby
        if job in host.line:
            host.line.remove(job)
            host.sending = None
        self._stop(job, keep_prefetch=True)
        job.prefer = prefer
        if job.prefetch is None:
            self._requeue_after(job, self.policy.requeue_s)
        else:
            job.state = "away"
        for other in list(host.line):
            if other.due_late and host.sending is None:
                self._send_final_state(other, other.epoch, host)
        if not host.leaving:
            self._start_waiting_jobs()

    def _prefetched(self, job: Job) -> None:
        """Requeue a job whose standby now has the previous checkpoint, and with the difference the last one."""
        job.prefetch = None
        if job.state == "away" and job.standby is not None and job.in_time and job.standby.reachable:
            self.checkpointer.set_holders(job, tuple(dict.fromkeys([*job.holders, job.standby])))
            self._requeue_after(job, self.policy.requeue_s)

    def _migrate_back(self, job: Job, home: Host, stay: int) -> None:
        now = self.kernel.now
        if job.state == "done" or home.stay != stay or not home.lent or home.leaving or job.host is home:
            return
        if job.came_back is None or now - job.came_back > BACK_WITHIN_S:
            return
        if job.state == "running" and fitting([home], job.submission) and job.host is not None and not job.host.leaving:
            self._vacate(job, job.host, GOES_HOME, home)
            job.reason = WENT_HOME
        elif job.state == "away" or job in self.waiting:
            job.prefer = home
        else:
            self.kernel.post(RETRY_HOME_S, self._migrate_back, job, home, stay)

    # --- losing a machine

    def _end_attempt(self, job: Job, host: Host, wait: float, noticed: bool) -> None:
        """End the attempt of a job whose machine departs under it."""
        now, counters = self.kernel.now, self.counters
        if job.state == "running":
            done = job.done(now, self._rate)
            job.stopped = now
            job.reason = VACATED
            job.note_end(VACATED, now)
            self._count_departure(job, host, True)
            counters.noticed += noticed
            if self.policy.redundancy is not None and self._buddy_available(job):
                job.safe, job.safe_here = done, True
                wait = self.policy.redundancy.pause_s
                if noticed:
                    job.noticed = job.in_time = True
                    counters.saved_in_time += 1
            lost = done - job.safe
            if lost > 0 and job.safe == 0:
                counters.restarted += 1
        elif job.state == "saving":
            lost = job.saving - job.safe
        else:
            self._count_departure(job, host, None)
            lost = 0.0
        if job.state in {"running", "saving"}:
            counters.lost += (
                max(0.0, min(lost, (done if job.state == "running" else job.saving) - job.began)) * job.submission.gpus
            )
            self._count_work(job, max(job.began, job.safe))
            self.log.add(now, "lost", job.submission.number, f"{lost:.6f}")
        self._stop(job)
        self._requeue_after(job, wait)

    def _buddy_available(self, job: Job) -> bool:
        """Tell whether the redundant machine is lent, has caught up, and stays beyond the pause."""
        redundancy, buddy, now = self.policy.redundancy, job.buddy, self.kernel.now
        if redundancy is None or buddy is None or not buddy.lent:
            return False
        return now >= job.buddy_from and buddy.departs_at > now + redundancy.pause_s

    def _find_buddy(self, job: Job) -> None:
        """Draw another machine that computes the same steps; a replacement takes a pause to catch up."""
        now = self.kernel.now
        if job.buddy is not None:
            job.buddy.buddies.pop(job, None)
        others = [host for host in self.hosts if host.lent and host is not job.host]
        assert self.policy.redundancy is not None
        job.buddy_from = now + self.policy.redundancy.pause_s if job.buddy is not None else now
        stream = self.streams.get(f"job {job.submission.number}", "buddy")
        job.buddy = others[int(stream.random() * len(others))] if others else None
        if job.buddy is not None:
            job.buddy.buddies[job] = None

    def _stop(self, job: Job, keep_prefetch: bool = False) -> None:
        """Take a job off its machine and cancel its transfers."""
        self._count_held(job)
        job.epoch += 1
        prefetch = job.prefetch
        if keep_prefetch:
            job.prefetch = None
        self._cancel_flows(job)
        if keep_prefetch:
            job.prefetch = prefetch
        job.due_late = job.copying = False
        if job.host is not None:
            job.host.guests.pop(job, None)
            if job.host.lent:
                job.host.free += job.submission.gpus
            job.host = None

    def _requeue_after(self, job: Job, wait: float) -> None:
        job.state = "away"
        self.kernel.post(wait, self._requeue, job, job.epoch)

    def _requeue(self, job: Job, epoch: int) -> None:
        if epoch == job.epoch and job.state == "away":
            job.state = "waiting"
            if self.policy.migrates_back and job.prefer is None and job.origin is not None:
                job.prefer = job.origin
            self.waiting[job] = None
            self._start_waiting_jobs()

    # --- flows

    def _cancel_flows(self, job: Job) -> None:
        for flow in (job.upload, job.prefetch, job.fetch, job.warming):
            if flow is not None:
                self.network.stop(flow)
        job.upload = job.prefetch = job.fetch = job.warming = None

    def _cancel_transfers(self, host: Host) -> None:
        """Cancel all transfers from and to a machine, and react for their jobs."""
        links = (self.topology.up[host.number], self.topology.down[host.number])
        for flow in list(dict.fromkeys(flow for link in links for flow in link.flows)):
            if flow.over:
                continue
            job = cast("Job", flow.owner)
            self.network.stop(flow)
            if flow is job.fetch:
                job.fetch = None
                if job.host is not None and job.host is not host:
                    self._fetch(job)
            elif flow is job.warming:
                job.warming = None
            elif flow is job.prefetch:
                job.prefetch = None
                if job.state == "away":
                    self._requeue_after(job, self.policy.requeue_s)
            elif flow is job.upload:
                job.upload = None
                if job.state == "running" and job.due_late and job.host is not host:
                    job.due_late = False
                    self.checkpointer.checkpoint(job, job.epoch)
                elif job.state == "saving" and job.host is not None and job.host is not host:
                    self._send_final_state(job, job.epoch, job.host)

    # --- accounts

    def _count_work(self, job: Job, until: float) -> None:
        """Count the work of this attempt up to `until` as kept."""
        kept = max(0.0, until - job.began) * job.submission.gpus
        self.counters.useful += kept
        if self.policy.redundancy is not None:
            self.counters.redundant += kept * self.policy.redundancy.overhead
        job.began = max(job.began, until)

    def _count_departure(self, job: Job, host: Host, counted: bool | None) -> None:
        job.departures += 1
        job.in_time = False
        if job.origin is host:
            host.displaced[job] = None
        if counted:
            self.counters.departures += 1

    def _count_held(self, job: Job) -> None:
        if job.host is not None:
            held = self.kernel.now - max(
                job.allocated, self.counts_from if self.kernel.now >= self.counts_from else 0.0
            )
            self.counters.held += max(0.0, held) * job.submission.gpus
            self.placement.charge(job.submission.user, int(max(0.0, held) * job.submission.gpus))
