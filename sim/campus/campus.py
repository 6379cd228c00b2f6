"""One run: a world, a policy, a seed. Departures and submissions are settled beforehand; what the policy does about them is not.

Ranking, filters, replica choice, queue order, the order of uploads under notice and the wait before a return are the product's
own cores. Leases, terms and gossip are represented by how long they take (docs/simulator.md): they have a simulator of their own.
"""

from math import inf

from mesh.jobs.onward import GOES_HOME, WENT_HOME, home_wait_s
from placement.schedule import Cover
from sim.campus.carrier import Carrier, numbers
from sim.campus.churn import DAY_S, Absence, absences, machines
from sim.campus.demand import Order, orders
from sim.campus.detection import quantiles_s
from sim.campus.fabric import SERVER, Fabric
from sim.campus.forecast import Forecast
from sim.campus.guest import Host, Job, fitting
from sim.campus.leaving import Leaving
from sim.campus.network import Network
from sim.campus.placing import Placing
from sim.campus.policies import Policy, delay_s
from sim.campus.saving import Saver
from sim.campus.tally import BACK_WITHIN_S, RESUMED_WITHIN_S, Tally
from sim.campus.world import World
from sim.kernel import EventLog, Kernel
from sim.streams import Streams

GIB = float(1 << 30)
HOUR_S = 3600.0
ALMOST_S = 1e-6
RETRY_HOME_S = 120.0  # between two looks at a home that is lent but full; ours
COVERED = 0.9  # of noticed departures nothing is lost; ours
VACATED = "vacated: its node leaves"


class Campus:
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
        self.fabric = Fabric(world, there, self.network, self.streams)
        self.forecast = Forecast([machine.room for machine in there], world.first_day)
        self.waiting: dict[Job, None] = {}
        self.jobs: list[Job] = []
        self._orders = iter(orders(world, self.streams))
        self.carrier = Carrier(self.network)
        self.placing = Placing(policy, self.kernel, self.hosts, self.forecast)
        self.saver = Saver(
            policy,
            self.kernel,
            world.costs,
            self.fabric,
            self.carrier,
            self.placing,
            self.forecast,
            min(machine.edge_bps for machine in there),
            self._mended_for,
        )
        self.leaving = Leaving(policy, self.kernel, world.costs, self.fabric, self.placing, self.saver)
        self.tally = self.saver.tally
        self._rate = self.saver.rate
        self._noticed = self._departed = 0

    def run(self) -> Tally:
        self.begin()
        self.kernel.run(self.end)
        self.close()
        return self.tally

    def begin(self) -> None:
        """Everything is scheduled that does not depend on the policy."""
        for host in self.hosts:
            self.forecast.lent(host.number, 0.0)
            self._expect(host)
        self._submit_next()
        self._hour()
        self.kernel.post(self.counts_from, self._begin_to_count)

    # --- the clock

    def _hour(self) -> None:
        self.fabric.hour(self.kernel.now, HOUR_S)
        if self.kernel.now + HOUR_S < self.end:
            self.kernel.post(HOUR_S, self._hour)

    def _begin_to_count(self) -> None:
        """What was before only warms up: the estimator learns, the machines fill."""
        self.tally = self.saver.tally = Tally()
        now = self.kernel.now
        for job in self.jobs:
            if job.state in {"running", "saving"}:
                # Its work up to here is not counted, and neither is its loss.
                job.began = job.done(now, self._rate) if job.state == "running" else job.saving
            job.allocated = max(job.allocated, now)
            job.noticed = False  # nor is how a departure of before ends

    def close(self) -> None:
        now = self.kernel.now
        for link in self.fabric.uplinks:
            link.fall_short(link.short, now)
        for job in self.jobs:
            if job.host is not None:
                self._give_back(job)
            if job.state == "running":
                self._count_work(job, job.done(now, self._rate))
            elif job.state == "saving":
                self._count_work(job, job.saving)

    # --- owners

    def _expect(self, host: Host) -> None:
        """The end of the stay that begins now."""
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
        host.line = self.leaving.settle(host, running, absence.start)
        for job in running:
            self.tally.noticed += 1
            self._count_departure(job, host, True)
            self._vacate(job, host, VACATED)
        self.log.add(now, "notice", host.machine.name, len(running))

    def _leave(self, host: Host, absence: Absence) -> None:
        kernel = self.kernel
        now = kernel.now
        self.log.add(now, "leave", host.machine.name, absence.kind, len(host.guests))
        host.lent = host.leaving = False
        host.weight_epoch = -1  # it tells so at once
        host.stay += 1
        self.forecast.left(host.number, now)
        self._departed += 1
        self._noticed += absence.kind == "noticed"
        self.saver.lossy = Cover(self._departed, COVERED * self._noticed).lossy
        gone = absence.kind != "noticed" or absence.dark
        delay = delay_s(self.policy.detection, quantiles_s(), self.streams.get(host.machine.name, "detection"))
        if gone:
            host.reachable = False
            self._break_off(host)
            if host.keeps and self.policy.keeps == "peers":
                kernel.post(delay, self.saver.mend, host, host.stay)
        wait = self.policy.requeue_s + (delay if absence.kind != "noticed" else 0.0)
        for job in list(host.guests):
            self._lose(job, host, wait, absence.kind == "noticed")
        host.line, host.sending = [], None
        for job in list(host.buddies):
            self._find_buddy(job)
        kernel.post(max(0.0, absence.end - now), self._back, host)

    def _back(self, host: Host) -> None:
        now = self.kernel.now
        host.lent = host.reachable = True
        host.weight_epoch = -1
        host.free = host.machine.gpus
        self.forecast.lent(host.number, now)
        self.log.add(now, "back", host.machine.name)
        self._expect(host)
        for job in list(host.displaced):
            if job.state != "done":
                self.tally.could_return += 1
                job.came_back = now
                if self.policy.goes_home:
                    wait = home_wait_s(self.policy.settle_s, host.id, job.attempts)
                    self.kernel.post(wait, self._go_home, job, host, host.stay)
        host.displaced.clear()
        self._fill()

    # --- submission and placement

    def _submit_next(self) -> None:
        order = next(self._orders, None)
        if order is not None:
            self.kernel.post(max(0.0, order.at - self.kernel.now), self._submit, order)

    def _submit(self, order: Order) -> None:
        job = Job(order)
        self.jobs.append(job)
        self.waiting[job] = None
        self._fill()
        self._submit_next()

    def _fill(self) -> None:
        """Start those who can be started, in the order in which they wait."""
        if not self.waiting:
            return
        hopeless: set[tuple[int, int]] = set()
        for job in self.placing.line(self.waiting):
            shape = job.order.shape
            if shape in hopeless or (job.holders and not any(host.reachable for host in job.holders)):
                continue
            able = self.placing.able(job.order)
            if not able:
                hopeless.add(shape)
                continue
            del self.waiting[job]
            self._start(job, self.placing.choose(job, able))

    def _mended_for(self, job: Job) -> None:
        if job in self.waiting:
            self._fill()

    # --- an attempt

    def _start(self, job: Job, host: Host) -> None:
        now = self.kernel.now
        host.free -= job.order.gpus
        host.guests[job] = None
        job.host = host
        job.epoch += 1
        job.state = "starting"
        job.allocated = now
        job.prefer = None
        self.log.add(now, "start", job.order.number, host.machine.name)
        self._fetch(job)

    def _fetch(self, job: Job) -> None:
        """Bring its last checkpoint here, if it is not here already."""
        host = job.host
        assert host is not None
        server = self.policy.keeps == "server"
        if job.safe <= 0 or job.safe_here or host in job.holders or self.policy.keeps == "nowhere":
            self._launch(job, job.epoch)
            return
        sources = [holder for holder in job.holders if holder.reachable]
        if not sources and not server:  # they went while it was on its way
            self._stop(job)
            self._requeue_after(job, 1.0)
            return
        path = self.fabric.path(SERVER if server else sources[0].number, (host.number,))
        epoch = job.epoch
        job.fetch = self.carrier.send(job, path, job.order.state_bytes, lambda: self._fetched(job, epoch), False)

    def _fetched(self, job: Job, epoch: int) -> None:
        job.fetch = None
        self._launch(job, epoch)

    def _launch(self, job: Job, epoch: int) -> None:
        costs = self.world.costs
        load_s = job.order.state_bytes / GIB / costs.write_gib_s if job.safe > 0 else 0.0
        self.kernel.post(costs.launch_s + load_s, self._begin, job, epoch)

    def _begin(self, job: Job, epoch: int) -> None:
        if epoch != job.epoch:
            return
        now, tally, host = self.kernel.now, self.tally, job.host
        assert host is not None
        job.state = "running"
        job.base = job.began = job.safe
        job.resumes = job.since = now
        job.safe_here = False
        tally.restoring += (now - job.allocated) * job.order.gpus
        if job.first_run is None:
            job.first_run = now
            job.origin = host
            tally.started += 1
            tally.waited_s += now - job.order.at
        if job.stopped is not None:
            down = now - job.stopped
            if job.reason != WENT_HOME:
                tally.downtimes.append(down)
                tally.migrated += job.noticed and job.in_time and down <= RESUMED_WITHIN_S
            job.stopped = None
        job.noticed = job.in_time = False
        if job.came_back is not None and host is job.origin:
            tally.returned += job.came_back >= self.counts_from and now - job.came_back <= BACK_WITHIN_S
            job.came_back = None
        job.note_start(now)
        if self.policy.redundancy is not None:
            self._find_buddy(job)
        self.kernel.post(max(0.0, (job.order.work_s - job.base) / self._rate), self._finish, job, job.epoch)
        self.saver.schedule(job)

    def _finish(self, job: Job, epoch: int) -> None:
        if epoch != job.epoch:
            return
        now, order = self.kernel.now, job.order
        left = order.work_s - job.done(now, self._rate)
        if left > ALMOST_S:  # checkpoints have held it up since
            self.kernel.post(max(0.0, job.resumes - now) + left / self._rate, self._finish, job, epoch)
            return
        self.log.add(now, "finish", order.number)
        self._count_work(job, order.work_s)
        tally = self.tally
        tally.finished += 1
        if 2 <= job.departures <= 4 and job.first_run is not None:
            tally.interrupted_jobs += 1
            tally.interrupted_s += now - job.first_run
            tally.interrupted_work_s += order.work_s
        self._stop(job)
        job.state = "done"
        self.saver.hold(job, ())
        for host in self.hosts if job.departures else ():
            host.displaced.pop(job, None)
        if job.buddy is not None:
            job.buddy.buddies.pop(job, None)
        self._fill()

    # --- leaving with a notice, and going home

    def _vacate(self, job: Job, host: Host, reason: str, prefer: Host | None = None) -> None:
        """It stops, saves, and ships what is not safe yet."""
        now = self.kernel.now
        job.saving = job.done(now, self._rate)
        job.due_late = job.copying = False
        job.stopped = now
        job.state = "saving"
        job.epoch += 1
        job.noticed, job.in_time = reason == VACATED, False
        job.reason, job.prefer = reason, prefer
        if reason != VACATED:
            job.heir, job.keeper = prefer, None
        job.note_end(WENT_HOME if reason == GOES_HOME else reason, now)
        self._drop_flows(job)
        save_s = self.leaving.save_s(job)
        self.tally.stalled += save_s * job.order.gpus
        if self.policy.notice == "migrate" and job.heir is None and job.keeper is None:
            job.heir = self.placing.heir(job, host)
        cold = job.heir is not None and job.heir not in job.holders and not job.is_warm(job.heir)
        if cold and job.heir is not None and job.safe > 0 and self.policy.keeps == "peers":
            sources = [holder for holder in job.holders if holder.reachable and holder is not host]
            if sources:  # it is sent the last checkpoint meanwhile, so that only the difference is missing
                path = self.fabric.path(sources[0].number, (job.heir.number,))
                job.prefetch = self.carrier.send(job, path, job.order.state_bytes, lambda: self._prefetched(job), False)
        self.kernel.post(save_s, self._ship, job, job.epoch, host)

    def _ship(self, job: Job, epoch: int, host: Host) -> None:
        if epoch != job.epoch:
            return
        if job in host.line:  # one after the other, in the order of the plan
            if host.sending is not None and host.sending is not job:
                job.due_late = True
                return
            host.sending = job
        now = self.kernel.now
        job.due_late = False
        targets = () if self.policy.keeps == "server" else self.leaving.targets(job, host)
        there = numbers(targets)
        count = self.leaving.final_bytes(job)
        path = self.fabric.path(host.number, there)
        job.upload = self.carrier.send(job, path, count, lambda: self._shipped(job, epoch, host, targets, now), False)

    def _shipped(self, job: Job, epoch: int, host: Host, targets: tuple[Host, ...], since: float) -> None:
        job.upload = None
        if epoch != job.epoch:
            return
        job.safe = job.saving
        job.in_time = True
        if job.noticed:
            self.tally.saved_in_time += 1
        if job.prefetch is not None and job.heir not in targets:  # then it fetches all of it from who has it
            self.carrier.drop(job.prefetch)
            job.prefetch = None
        holders = tuple(target for target in targets if target is not job.heir or job.prefetch is None)
        self.saver.hold(job, holders or targets)
        job.sent_to = numbers(job.holders)
        self._count_work(job, job.saving)
        prefer = job.heir
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
                self._ship(other, other.epoch, host)
        if not host.leaving:
            self._fill()

    def _prefetched(self, job: Job) -> None:
        """The heir has the checkpoint before the last; with the difference, it has the last."""
        job.prefetch = None
        if job.state == "away" and job.heir is not None and job.in_time and job.heir.reachable:
            self.saver.hold(job, tuple(dict.fromkeys([*job.holders, job.heir])))
            self._requeue_after(job, self.policy.requeue_s)

    def _go_home(self, job: Job, home: Host, stay: int) -> None:
        now = self.kernel.now
        if job.state == "done" or home.stay != stay or not home.lent or home.leaving or job.host is home:
            return
        if job.came_back is None or now - job.came_back > BACK_WITHIN_S:
            return
        if job.state == "running" and fitting([home], job.order) and job.host is not None and not job.host.leaving:
            self._vacate(job, job.host, GOES_HOME, home)
            job.reason = WENT_HOME
        elif job.state == "away" or job in self.waiting:
            job.prefer = home
        else:
            self.kernel.post(RETRY_HOME_S, self._go_home, job, home, stay)

    # --- losing a machine

    def _lose(self, job: Job, host: Host, wait: float, noticed: bool) -> None:
        """Its machine goes, and it is still there."""
        now, tally = self.kernel.now, self.tally
        if job.state == "running":
            done = job.done(now, self._rate)
            job.stopped = now
            job.reason = VACATED
            job.note_end(VACATED, now)
            self._count_departure(job, host, True)
            tally.noticed += noticed
            if self.policy.redundancy is not None and self._buddy_stands(job):
                job.safe, job.safe_here = done, True
                wait = self.policy.redundancy.pause_s
                if noticed:
                    job.noticed = job.in_time = True
                    tally.saved_in_time += 1
            lost = done - job.safe
            if lost > 0 and job.safe == 0:
                tally.restarted += 1
        elif job.state == "saving":
            lost = job.saving - job.safe
        else:
            self._count_departure(job, host, None)
            lost = 0.0
        if job.state in {"running", "saving"}:
            tally.lost += (
                max(0.0, min(lost, (done if job.state == "running" else job.saving) - job.began)) * job.order.gpus
            )
            self._count_work(job, max(job.began, job.safe))
            self.log.add(now, "lost", job.order.number, f"{lost:.6f}")
        self._stop(job)
        self._requeue_after(job, wait)

    def _buddy_stands(self, job: Job) -> bool:
        """Whether its other machine is there, has caught up, and does not go before the pause is over."""
        redundancy, buddy, now = self.policy.redundancy, job.buddy, self.kernel.now
        if redundancy is None or buddy is None or not buddy.lent:
            return False
        return now >= job.buddy_from and buddy.departs_at > now + redundancy.pause_s

    def _find_buddy(self, job: Job) -> None:
        """Another machine that computes the same; it takes a while to catch up when one is replaced."""
        now = self.kernel.now
        if job.buddy is not None:
            job.buddy.buddies.pop(job, None)
        others = [host for host in self.hosts if host.lent and host is not job.host]
        assert self.policy.redundancy is not None
        job.buddy_from = now + self.policy.redundancy.pause_s if job.buddy is not None else now
        stream = self.streams.get(f"job {job.order.number}", "buddy")
        job.buddy = others[int(stream.random() * len(others))] if others else None
        if job.buddy is not None:
            job.buddy.buddies[job] = None

    def _stop(self, job: Job, keep_prefetch: bool = False) -> None:
        """It is on no machine any more."""
        self._give_back(job)
        job.epoch += 1
        prefetch = job.prefetch
        if keep_prefetch:
            job.prefetch = None
        self._drop_flows(job)
        if keep_prefetch:
            job.prefetch = prefetch
        job.due_late = job.copying = False
        if job.host is not None:
            job.host.guests.pop(job, None)
            if job.host.lent:
                job.host.free += job.order.gpus
            job.host = None

    def _requeue_after(self, job: Job, wait: float) -> None:
        job.state = "away"
        self.kernel.post(wait, self._requeue, job, job.epoch)

    def _requeue(self, job: Job, epoch: int) -> None:
        if epoch == job.epoch and job.state == "away":
            job.state = "waiting"
            if self.policy.goes_home and job.prefer is None and job.origin is not None:
                job.prefer = job.origin
            self.waiting[job] = None
            self._fill()

    # --- flows

    def _drop_flows(self, job: Job) -> None:
        for flow in (job.upload, job.prefetch, job.fetch, job.warming):
            if flow is not None:
                self.carrier.drop(flow)
        job.upload = job.prefetch = job.fetch = job.warming = None

    def _break_off(self, host: Host) -> None:
        """All that comes from it or goes to it."""
        links = (self.fabric.up[host.number], self.fabric.down[host.number])
        for flow in list(dict.fromkeys(flow for link in links for flow in link.flows)):
            job = self.carrier.job_of(flow)
            self.carrier.drop(flow)
            if job is None:
                continue
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
                    self.saver.checkpoint(job, job.epoch)
                elif job.state == "saving" and job.host is not None and job.host is not host:
                    self._ship(job, job.epoch, job.host)

    # --- accounts

    def _count_work(self, job: Job, until: float) -> None:
        """What it did in this attempt, up to there, is kept."""
        kept = max(0.0, until - job.began) * job.order.gpus
        self.tally.useful += kept
        if self.policy.redundancy is not None:
            self.tally.redundant += kept * self.policy.redundancy.overhead
        job.began = max(job.began, until)

    def _count_departure(self, job: Job, host: Host, counted: bool | None) -> None:
        job.departures += 1
        job.in_time = False
        if job.origin is host:
            host.displaced[job] = None
        if counted:
            self.tally.departures += 1

    def _give_back(self, job: Job) -> None:
        if job.host is not None:
            held = self.kernel.now - max(
                job.allocated, self.counts_from if self.kernel.now >= self.counts_from else 0.0
            )
            self.tally.held += max(0.0, held) * job.order.gpus
            self.placing.used(job.order.user, int(max(0.0, held) * job.order.gpus))
