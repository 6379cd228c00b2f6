"""Metrics of a daemon: name, kind, labels. A test compares docs/reference/metrics.md and the dashboard with this list.

No label is a job, a user, or a name that a stranger chooses: their number would have no bound. `gpu` is a UUID of this machine's,
the others are words of the code.
"""

from mesh.api.exposition import Metric

STAGES = ("suspended", "notice", "saved", "paused", "exited", "killed", "gone")
STAGE_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
OTHER = "other"

METRICS = (
    Metric("mesh_build_info", "gauge", "1, with the version of the daemon and those of its wire and state.",
           ("version", "wire", "state")),
    Metric("mesh_started_time_seconds", "gauge", "When the daemon started, in Unix seconds."),
    Metric("process_resident_memory_bytes", "gauge", "Of the daemon's process."),
    Metric("process_cpu_seconds_total", "counter", "User and system time of the daemon's process."),
    Metric("process_open_fds", "gauge", "Open file descriptors of the daemon's process."),
    # GPUs, by NVML
    Metric("mesh_gpu_info", "gauge", "1, with the model of a GPU of this machine.", ("gpu", "model")),
    Metric("mesh_gpu_utilization_ratio", "gauge", "Part of the last sample period in which a kernel ran.", ("gpu",)),
    Metric("mesh_gpu_memory_used_bytes", "gauge", "Memory in use, by all programs.", ("gpu",)),
    Metric("mesh_gpu_memory_total_bytes", "gauge", "Memory that the GPU has.", ("gpu",)),
    Metric("mesh_gpu_temperature_celsius", "gauge", "Temperature of the GPU's die.", ("gpu",)),
    Metric("mesh_gpu_power_watts", "gauge", "What the board draws now.", ("gpu",)),
    # what is lent
    Metric("mesh_lending", "gauge", "1 while the machine takes guests, else 0."),
    Metric("mesh_paused", "gauge", "1 while its owner has paused lending, else 0."),
    Metric("mesh_owner_present", "gauge", "1 while its owner's presence keeps it from being lent, else 0."),
    Metric("mesh_slots", "gauge", "Places for jobs without GPUs."),
    Metric("mesh_slots_free", "gauge", "Of those, free."),
    Metric("mesh_gpu_share_given_ratio", "gauge", "Part of the GPU's time that guests are guaranteed.", ("gpu",)),
    Metric("mesh_gpu_memory_given_bytes", "gauge", "Memory of the GPU that guests are guaranteed.", ("gpu",)),
    Metric("mesh_gpu_foreign_bytes", "gauge", "Memory of the GPU in use by others than guests.", ("gpu",)),
    # guests
    Metric("mesh_guests", "gauge", "Attempts here now: preparing, running, or standing still.", ("engine", "state")),
    Metric("mesh_guest_starts_total", "counter", "Guests that an engine was asked to start.", ("engine", "result")),
    Metric("mesh_attempts_ended_total", "counter", "Attempts that ended here, and how.", ("engine", "end")),
    Metric("mesh_attempt_seconds_total", "counter", "How long attempts that ended here had run.", ("engine",)),
    Metric("mesh_gpu_seconds_total", "counter", "The same in GPU-seconds that they held, by their share."),
    Metric("mesh_checkpoints_total", "counter", "Checkpoints of guests here that others hold."),
    Metric("mesh_work_at_risk_seconds", "gauge", "GPU-seconds (seconds of a slot) lost if this node died now, of all."),
    Metric("mesh_work_at_risk_max_seconds", "gauge", "The same, of the job here with the most."),
    Metric("mesh_work_lost_seconds_total", "counter", "Work of attempts that had to leave, that no checkpoint had."),
    Metric("mesh_reclaims_total", "counter", "Attempts that the owner sent away."),
    Metric("mesh_reclaim_stage_seconds", "histogram", "From the owner's order until a guest was there.", ("stage",)),
    # the mesh, as seen from here
    Metric("mesh_members", "gauge", "Nodes by state, as this one sees them.", ("state",)),
    Metric("mesh_jobs", "gauge", "Jobs that this node has heard of, by state.", ("state",)),
    Metric("mesh_gossip_total", "counter", "What membership has counted: packets, records, pings.", ("event",)),
    Metric("mesh_refused_total", "counter", "What peers sent that was refused.", ("reason",)),
    Metric("mesh_clock_offset_seconds", "gauge", "By how much this clock is ahead of the others'."),
    # checkpoints
    Metric("mesh_transfers_open", "gauge", "Streams of checkpoints that are being sent.", ("urgency",)),
    Metric("mesh_transfer_sent_bytes_total", "counter", "Bytes of such streams that peers acknowledged.", ("urgency",)),
    Metric("mesh_store_bytes", "gauge", "Checkpoints on this disk: all, and those of others' jobs.", ("owner",)),
    Metric("mesh_store_room_bytes", "gauge", "What the store may still take; absent without a quota."),
    Metric("mesh_image_received_bytes_total", "counter", "Bytes of image blobs that came from other nodes."),
    Metric("mesh_problems", "gauge", "What `mesh status` tells as a problem now."),
)  # fmt: skip
