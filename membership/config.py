"""Every knob of the membership protocol, with what to set it to and where its value comes from."""

import msgspec


class SwimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timings in seconds. The defaults suit a LAN of up to a few hundred nodes.

    probe_interval_s: one peer is probed each interval; detection takes about 1.6 intervals (SWIM) plus suspicion.
    probe_timeout_s: an answer later than this starts indirect probes; well above the 99th percentile of the round trip.
    indirect_probes: relays asked when a probe times out (SWIM's k).
    suspicion_multiplier, suspicion_max_multiplier: shortest suspicion = multiplier * log10(n) * interval, longest = that
        times the second; confirmations move it from longest to shortest (Lifeguard).
    refused_floor_s: a suspicion for which two nodes saw the machine refuse connections runs out this long after the second;
        time for a daemon that is being restarted to say so.
    lag_s: a timer that comes later than this means that this node itself stood still, and accuses nobody.
    accuser_credit, accuser_window_s: an accuser that was refuted this often within the window confirms nothing.
    gossip_interval_s, gossip_fanout: rumours go to this many members each tick.
    retransmit_multiplier: a rumour is sent multiplier * ceil(log10(n + 1)) times (memberlist).
    settle_s: when every root heard for so long has differed from ours, one of those peers is reconciled with; until then
        rumours are on their way.
    reconcile_interval_s: roots are compared with one random peer over TCP too, in case pings have not shown a difference.
    cross_zone_interval_s: and with one of another zone, so that zones that hear little of each other agree.
    reconcile_pause_s: between two push-pulls with one peer.
    dead_reconcile_interval_s: one dead member is knocked at, which heals partitions.
    source_packets_s: packets a second taken from one address before any signature is checked; eight times that at once.
    dead_forget_s: how long a dead or left member is remembered, so that old rumours cannot revive it.
    """

    probe_interval_s: float = 1.0  # memberlist LAN
    probe_timeout_s: float = 0.5  # memberlist LAN
    indirect_probes: int = 3  # memberlist LAN
    suspicion_multiplier: float = 4.0  # memberlist LAN
    suspicion_max_multiplier: float = 6.0  # memberlist LAN
    refused_floor_s: float = 1.0  # ours: one probe interval; a daemon of ours restarts in 0.5 s
    lag_s: float = 0.25  # ours: half the probe timeout
    accuser_credit: int = 10  # ours
    accuser_window_s: float = 600.0  # ours
    gossip_interval_s: float = 0.2  # memberlist LAN
    gossip_fanout: int = 3  # memberlist LAN
    retransmit_multiplier: int = 4  # memberlist LAN
    health_max: int = 8  # memberlist AwarenessMaxMultiplier
    settle_s: float = 2.0  # ours: ten gossip ticks, within which a rumour has reached everybody
    reconcile_interval_s: float = 60.0  # ours: every ping compares roots already
    cross_zone_interval_s: float = 30.0  # ours
    reconcile_pause_s: float = 0.3  # ours
    source_packets_s: float = 100.0  # ours: a busy peer sends 20 a second while everything changes
    dead_reconcile_interval_s: float = 20.0  # ours: heals partitions (memberlist issue 222)
    dead_forget_s: float = 24 * 3600.0  # serf's tombstones
    packet_bytes: int = 1200  # under the 1280 B every IPv6 path carries, with headers
    max_members: int = 2000  # ours; a bound, not a goal

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "probe_timeout_s", "gossip_interval_s", "reconcile_interval_s"):
            if not 0.01 <= getattr(self, name) <= 3600:
                raise ValueError(f"{name} must be 0.01 to 3600 seconds")
        if self.probe_timeout_s > self.probe_interval_s:
            raise ValueError("probe_timeout_s cannot be longer than probe_interval_s")
        if not 512 <= self.packet_bytes <= 65_000:
            raise ValueError("packet_bytes must be 512 to 65000")

    @classmethod
    def lan(cls) -> "SwimConfig":
        return cls()

    @classmethod
    def local(cls) -> "SwimConfig":
        """For several daemons on one machine: a crash is known in about two seconds."""
        return cls(
            probe_interval_s=0.5,
            probe_timeout_s=0.25,
            suspicion_multiplier=3.0,
            suspicion_max_multiplier=2.0,
            gossip_interval_s=0.1,
            settle_s=1.0,
            reconcile_interval_s=10.0,
            dead_reconcile_interval_s=5.0,
        )
