"""Fault plans, drawn from the seed: each fault occurs in about half of the runs (swarm testing, Groce et al. 2012)."""

from random import Random

import msgspec

from sim.protocol import journal_faults


class FaultPlan(msgspec.Struct, frozen=True):
    """The faults of one run. Rates are shares of packets; an incident happens every `incident_every_s` on average.

    `broken_calls` is the share of calls between checkpoint stores that end half-way or get no answer, while gossip passes.
    Every `brought_again_s`, to the end of the run, members bring the submissions of all unfinished jobs once more; 0: never.
    `wrong_clock_s` is the error of the last node's wall clock. Others may reject that node, but it must do no harm. The founder's
    clock has it, too, when it revokes a first node.
    `gentle` runs have only packet loss, stalls and false accusations; no healthy node may be declared dead in them (M12).
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    replay: float = 0.0
    garbage: float = 0.0
    delay_s: tuple[float, float] = (0.0002, 0.005)
    slow: float = 0.0
    broken_calls: float = 0.0
    brought_again_s: float = 0.0
    offset_s: float = 0.0
    wrong_clock_s: float = 0.0
    drift: float = 0.0
    incidents: tuple[str, ...] = ()
    incident_every_s: float = 30.0
    news_every_s: float = 200.0  # between two sections that a node publishes
    gentle: bool = False
    until_s: float = 1500.0


INCIDENTS = (
    "crash",
    "crash around fsync",
    "wipe",
    "leave",
    "stall",
    "suspend",
    "partition",
    "partial partition",
    "one way",
    "address",
    "power cut",
    "mass restart",
    "revoke",
)
LIES = ("false accusation",)
TRUST_INCIDENTS = ("renew",)


def draw_faults(seed: int, minutes: float) -> FaultPlan:
    """Draw the faults of a membership run; they stop five minutes before its end."""
    rng = Random(f"mix/{seed}")
    until_s = max(60.0, minutes * 60 - 300)

    def maybe(high: float) -> float:
        return rng.uniform(0, high) if rng.random() < 0.5 else 0.0

    lies = LIES if Random(f"accuse/{seed}").random() < 0.5 else ()
    if rng.random() < 0.3:
        # Lifeguard's claim: loss, and stalls of fewer than a quarter of the nodes, cause no false deaths.
        return FaultPlan(
            loss=maybe(0.25),
            duplicate=maybe(0.1),
            reorder=maybe(0.2),
            drift=maybe(0.01),
            offset_s=maybe(100.0),
            incidents=("stall", *lies),
            incident_every_s=rng.uniform(5, 20),
            gentle=True,
            until_s=until_s,
        )
    return FaultPlan(
        loss=maybe(0.3),
        duplicate=maybe(0.2),
        reorder=maybe(0.3),
        replay=maybe(0.05),
        garbage=maybe(0.02),
        delay_s=(0.0002, rng.choice([0.002, 0.02, 0.1])),
        slow=maybe(0.1),
        offset_s=maybe(100.0),
        wrong_clock_s=rng.choice([-1, 1]) * rng.uniform(1, 20) * 86_400 if rng.random() < 0.2 else 0.0,
        drift=maybe(0.01),
        incidents=(
            *(incident for incident in INCIDENTS if rng.random() < 0.5),
            *(incident for incident in TRUST_INCIDENTS if Random(f"trust/{seed}").random() < 0.5),
            *lies,
        ),
        incident_every_s=rng.uniform(10, 90),
        until_s=until_s,
    )


JOB_INCIDENTS = (
    "crash at a save",
    "switch",
    "notice",
    "migrate",
    "cancel",
    "forgery",
    "theft",
    "lie",
    "echo",
    "closed port",
    "retire",
    "scrap",
)
STORE_INCIDENTS = ("full store", "small quota")
CLOCK_INCIDENTS = ("pause",)
GOSSIP_INCIDENTS = ("rumour",)


def draw_job_faults(seed: int, minutes: float) -> FaultPlan:
    """Draw the faults of a jobs run: those of membership, incidents of jobs, and in some runs a much worse network."""
    faults, rng = draw_faults(seed, minutes), Random(f"jobs/{seed}")
    incidents = [incident for incident in faults.incidents if incident not in TRUST_INCIDENTS]
    incidents += [incident for incident in JOB_INCIDENTS if rng.random() < 0.5]
    incidents += [incident for incident in CLOCK_INCIDENTS if Random(f"clock/{seed}").random() < 0.5]
    disk = Random(f"disk/{seed}")
    incidents += [incident for incident in journal_faults.INCIDENTS if disk.random() < 0.5]
    incidents += [incident for incident in GOSSIP_INCIDENTS if Random(f"gossip/{seed}").random() < 0.5]
    every_s = rng.uniform(4.0, 30.0)
    if rng.random() < 0.15:
        faults = msgspec.structs.replace(faults, loss=rng.uniform(0.2, 0.4), duplicate=rng.uniform(0.2, 0.5))
    stores, again = Random(f"stores/{seed}"), Random(f"again/{seed}")
    incidents += [incident for incident in STORE_INCIDENTS if stores.random() < 0.5]
    return msgspec.structs.replace(
        faults,
        incidents=tuple(incidents),
        incident_every_s=every_s,
        broken_calls=stores.uniform(0.0, 0.3) if stores.random() < 0.5 else 0.0,
        brought_again_s=again.uniform(1.0, 40.0) if again.random() < 0.2 else 0.0,
        wrong_clock_s=0.0,
        news_every_s=0.0,
        gentle=False,
    )


class MeshPlan(msgspec.Struct, frozen=True):
    """The mesh of one jobs run. All but the first two nodes may be late or old.

    `late` of its nodes join after the first ones, and `closed` of them take no calls until the faults stop, though their gossip
    arrives: a firewall. `old` of its nodes refuse every job's description, as older versions do. `gangs` is the share of jobs
    that run on several nodes at once.
    """

    nodes: int = 12
    late: float = 0.0
    closed: float = 0.0
    old: float = 0.0
    gangs: float = 0.25


def draw_mesh(seed: int) -> MeshPlan:
    """Draw the mesh of a jobs run: 2 to 12 nodes."""
    rng = Random(f"mesh/{seed}")

    def maybe(high: float) -> float:
        return rng.uniform(0, high) if rng.random() < 0.5 else 0.0

    return MeshPlan(
        nodes=rng.randint(2, 12),
        late=maybe(1.0),
        closed=maybe(0.7),
        old=maybe(0.7),
        gangs=rng.choice((0.25, 0.25, 1.0)),
    )


class WorkPlan(msgspec.Struct, frozen=True):
    """The jobs of one run, as shares: `failing` have guests that fail, `limited` may run for a time or until a deadline only, and
    the guests of `stubborn` ones do not react to a notice. `after` wait for another job, and `arrays` are arrays of jobs. `busy`
    of the nodes have no place for jobs, and the others have one; jobs have different priorities then. The users of `selective`
    jobs exclude half of the nodes.
    """

    failing: float = 0.0
    limited: float = 0.0
    stubborn: float = 0.0
    after: float = 0.0
    arrays: float = 0.0
    busy: float = 0.0
    selective: float = 0.0


def draw_work_plan(seed: int) -> WorkPlan:
    rng = Random(f"work/{seed}")

    def maybe(high: float) -> float:
        return rng.uniform(0.1, high) if rng.random() < 0.5 else 0.0

    return WorkPlan(
        failing=maybe(0.7),
        limited=maybe(0.7),
        stubborn=maybe(1.0),
        after=maybe(0.7),
        arrays=maybe(0.4),
        busy=rng.uniform(0.5, 0.9) if rng.random() < 0.4 else 0.0,
        selective=maybe(0.7),
    )
