"""Parameters of the membership protocol, with guidance and the source of each default."""

import msgspec

MAX_RELAYED = 64  # members that one node may lend a port to (own choice)


class SwimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Timings in seconds. The defaults suit a LAN of up to a few hundred nodes.

    probe_interval_s: one peer is probed each interval; detection takes about 1.6 intervals (SWIM) plus suspicion.
    probe_timeout_s: a later ack starts indirect probes; set it well above the 99th percentile of the round-trip time.
    indirect_probes: relays asked when a probe times out (SWIM's k).
    suspicion_multiplier, suspicion_max_multiplier: the shortest suspicion lasts multiplier * log10(n) * interval, the longest
        that times the second; confirmations move it from the longest to the shortest (Lifeguard).
    refused_floor_s: a suspicion with two refused connections ends this long after the second one; a restarting daemon has
        this time to refute.
    lag_s: a timer that fires later than this shows that this node itself stood still; it then accuses nobody.
    accuser_credit, accuser_window_s: an accuser that was refuted this often within the window is ignored.
    gossip_interval_s, gossip_fanout: rumours go to this many members each interval.
    retransmit_multiplier: a rumour is sent multiplier * ceil(log10(n + 1)) times (memberlist).
    settle_s: if every root received for this long differs from ours, one of those peers is reconciled with; until then
        rumours may settle the difference.
    reconcile_interval_s: interval at which roots are also compared with a random peer over TCP.
    cross_zone_interval_s: the same with a peer of another zone, so that zones with little traffic between them agree.
    reconcile_pause_s: minimum interval between two push-pulls with one peer.
    dead_reconcile_interval_s: interval at which one dead member is contacted, which heals partitions.
    source_packets_s: packets per second accepted from one host before signatures are checked; bursts of eight times that.
    dead_forget_s: time for which a dead or left member is remembered, so that old rumours cannot revive it.
    """

    probe_interval_s: float = 1.0  # memberlist LAN
    probe_timeout_s: float = 0.5  # memberlist LAN
    indirect_probes: int = 3  # memberlist LAN
    suspicion_multiplier: float = 4.0  # memberlist LAN
    suspicion_max_multiplier: float = 6.0  # memberlist LAN
    refused_floor_s: float = 1.0  # one probe interval; measured: a daemon restarts in 0.5 s
    lag_s: float = 0.25  # half the probe timeout
    accuser_credit: int = 10  # own choice
    accuser_window_s: float = 600.0  # own choice
    gossip_interval_s: float = 0.2  # memberlist LAN
    gossip_fanout: int = 3  # memberlist LAN
    retransmit_multiplier: int = 4  # memberlist LAN
    health_max: int = 8  # memberlist AwarenessMaxMultiplier
    settle_s: float = 2.0  # ten gossip intervals, within which a rumour reaches every member
    reconcile_interval_s: float = 60.0  # pings compare roots already
    cross_zone_interval_s: float = 30.0  # own choice
    reconcile_pause_s: float = 0.3  # own choice
    source_packets_s: float = 100.0  # a busy peer sends 20 a second during a mass restart
    dead_reconcile_interval_s: float = 20.0  # heals partitions (memberlist issue 222)
    dead_forget_s: float = 24 * 3600.0  # serf's tombstone timeout
    packet_bytes: int = 1200  # with headers below 1280 B, the minimum MTU of IPv6
    max_members: int = 2000  # a bound, not a goal

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
        """Return timings for several daemons on one machine: a crash is detected in about two seconds."""
        return cls(
            probe_interval_s=0.5,
            probe_timeout_s=0.25,
            suspicion_multiplier=3.0,
            suspicion_max_multiplier=2.0,
            gossip_interval_s=0.1,
            settle_s=1.0,
            reconcile_interval_s=10.0,
            dead_reconcile_interval_s=5.0,
            source_packets_s=1000.0,  # of several daemons together
        )
