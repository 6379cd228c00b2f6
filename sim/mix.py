"""Which faults a run has, drawn from its seed: each in about half of the runs, so that none hides another."""

from random import Random

import msgspec


class Mix(msgspec.Struct, frozen=True):
    """The faults of one run. Rates are shares of packets; `strikes` are what happens now and then, every `strike_every_s`.

    `wrong_clock_s`: the last node's wall clock is off by so much; it may be shut out, but must do no harm.
    `gentle`: only losses and nodes that stand still, under which no healthy node may ever be given up (M12).
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    replay: float = 0.0
    garbage: float = 0.0
    delay_s: tuple[float, float] = (0.0002, 0.005)
    slow: float = 0.0
    offset_s: float = 0.0
    wrong_clock_s: float = 0.0
    drift: float = 0.0
    strikes: tuple[str, ...] = ()
    strike_every_s: float = 30.0
    news_every_s: float = 200.0  # of each node: it publishes something
    gentle: bool = False
    until_s: float = 1500.0


STRIKES = (
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


def draw_mix(seed: int, minutes: float) -> Mix:
    """Each fault is in about half of the runs, so that none hides another (swarm testing, Groce et al. 2012)."""
    rng = Random(f"mix/{seed}")
    until_s = max(60.0, minutes * 60 - 300)

    def maybe(high: float) -> float:
        return rng.uniform(0, high) if rng.random() < 0.5 else 0.0

    if rng.random() < 0.3:
        # Lifeguard's promise: loss, and fewer than a quarter that stand still, condemn nobody else.
        return Mix(
            loss=maybe(0.25),
            duplicate=maybe(0.1),
            reorder=maybe(0.2),
            drift=maybe(0.01),
            offset_s=maybe(100.0),
            strikes=("stall",),
            strike_every_s=rng.uniform(5, 20),
            gentle=True,
            until_s=until_s,
        )
    return Mix(
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
        strikes=tuple(strike for strike in STRIKES if rng.random() < 0.5),
        strike_every_s=rng.uniform(10, 90),
        until_s=until_s,
    )


JOB_STRIKES = ("crash at a save", "switch", "notice", "migrate", "cancel", "forgery")
NOT_HERE = {"revoke"}  # ends a user's jobs by other rules


def draw_job_mix(seed: int, minutes: float) -> Mix:
    """The menu of tier A, and what befalls jobs besides; each in about half of the runs."""
    mix, rng = draw_mix(seed, minutes), Random(f"jobs/{seed}")
    strikes = [strike for strike in mix.strikes if strike not in NOT_HERE]
    strikes += [strike for strike in JOB_STRIKES if rng.random() < 0.5]
    every_s = rng.uniform(4.0, 30.0)
    return msgspec.structs.replace(
        mix, strikes=tuple(strikes), strike_every_s=every_s, wrong_clock_s=0.0, news_every_s=0.0, gentle=False
    )
