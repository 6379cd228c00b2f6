"""The authority matrix as data: who may do what, the function that decides it, the place that asks it, and the test.

docs/reference/authority.md shows `table()`; `test_authority.py` plays the rows that have a `call` with every kind of actor.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

STRANGER, MEMBER, OTHER_RUNNER, WITNESS = "stranger", "member", "runner of another job", "witness"
GANG, RUNNER, USER = "gang member", "runner", "user"
WHO = (STRANGER, MEMBER, OTHER_RUNNER, WITNESS, GANG, RUNNER, USER)
PEERS, PARTICIPANT = "mesh/api/handlers/peers.py", "mesh/consensus/participant.py"
PLAYED = "tests/adversary/test_authority.py:test_call_is_answered_as_the_matrix_says"
ASKED = "tests/jobs/test_authority.py"


class Row(msgspec.Struct, frozen=True):
    """`who`: those that are admitted, besides the job's user in every case of a job's own data. `decided`: the function of
    `mesh/jobs/authority.py`, or the check itself.
    """

    what: str
    who: frozenset[str]
    decided: str
    asked: str
    test: str
    call: str = ""


def _row(what: str, who: tuple[str, ...], decided: str, asked: str, test: str = PLAYED, call: str = "") -> Row:
    return Row(what, frozenset(who), decided, asked, test, call)


MATRIX = (
    _row("Connect, and read a job's description", (MEMBER,), "peer_of", f"{PEERS}:_admit", call="spec"),
    _row("Read a witness's record of a job", (MEMBER,), "peer_of", f"{PEERS}:_admit", call="record"),
    _row("Read the events of a job", (MEMBER,), "peer_of", f"{PEERS}:_admit", call="events"),
    _row(
        "Have a witness keep one's own events of a job",
        (WITNESS, GANG, RUNNER, USER),
        "may_report",
        "mesh/jobs/event_log.py:on_report",
        call="report",
    ),
    _row("Read the files of a running job", (USER,), "is_user", f"{PEERS}:_files", call="files"),
    _row("Read the files of a gang member", (USER,), "is_user", f"{PEERS}:_files", call="mate's files"),
    _row("Read the log of an attempt", (USER,), "is_user", f"{PEERS}:_log", call="log"),
    _row(
        "Run commands in a job, read its control files, connect to its ports",
        (USER,),
        "may_enter",
        "mesh/api/handlers/tunnels.py:_enter",
        call="control",
    ),
    _row(
        "Get a part of a job's key",
        (USER, RUNNER, GANG),
        "is_user, runs",
        "mesh/checkpoints/keys.py:held_for",
        call="key",
    ),
    _row(
        "Bring a witness a share of a job's key",
        (USER, RUNNER),
        "may_give_share",
        "mesh/checkpoints/keys.py:store_share",
        call="share",
    ),
    _row(
        "Get a part of the key of a job's secrets",
        (RUNNER, GANG),
        "runs, may_read_secrets",
        "mesh/checkpoints/keys.py:held_for",
        call="secrets key",
    ),
    _row(
        "Bring a witness a share of the key of a job's secrets",
        (RUNNER,),
        "may_give_secrets_share",
        "mesh/checkpoints/keys.py:store_share",
        call="secrets share",
    ),
    _row("Keep a copy of one's own log with a witness", (RUNNER, GANG), "runs", f"{PEERS}:_put_log", call="log copy"),
    _row(
        "Sign a checkpoint or result that a store takes, and move the job's fence",
        (RUNNER,),
        "is_writer",
        "mesh/jobs/vouching.py:judge",
        call="manifest",
    ),
    _row("Move the fence beyond the lease", (), "is_writer", "mesh/jobs/vouching.py:judge", call="fence"),
    _row(
        "Store a working directory before there is a job",
        ("member that may submit, for its own user",),
        "may_keep_workdir",
        "mesh/jobs/vouching.py:judge",
        "tests/adversary/test_authority.py:test_workdir_is_kept_for_its_own_user_only",
    ),
    _row(
        "Ask for a term of a job",
        (WITNESS,),
        "the group",
        "mesh/consensus/witness.py:_may_promise",
        "tests/consensus/test_witness.py:test_only_a_witness_of_the_job_gets_a_promise",
        call="term",
    ),
    _row(
        "Take the lease of a job",
        ("provider with an advert and the warrant of a witness",),
        "may_propose",
        f"{PARTICIPANT}:_may_propose",
        f"{ASKED}:test_lease_needs_the_word_of_a_witness",
    ),
    _row(
        "Take the lease of a job whose user names the nodes that may run it, or excludes some",
        ("such a provider, if it may run the job",),
        "allows",
        "mesh/jobs/authority.py:may_propose",
        f"{ASKED}:test_lease_is_for_nodes_that_the_jobs_user_lets_run_it",
    ),
    _row(
        "Change the record or the group",
        (WITNESS, RUNNER),
        "may_propose",
        f"{PARTICIPANT}:_may_propose",
        f"{ASKED}:test_group_is_changed_by_no_other_member",
    ),
    _row(
        "Make a node a witness of a job in a later group",
        (WITNESS, RUNNER),
        "may_seek_witness, may_introduce, may_propose",
        "mesh/jobs/vouching.py:allows",
        "tests/jobs/test_vouching.py:test_node_joins_no_group_that_the_witnesses_do_not_know",
    ),
    _row(
        "Ask a runner to make room for a more important job",
        ("witness of that job, while it waits",),
        "may_ask_for_room",
        "mesh/jobs/vouching.py:allows",
        "tests/jobs/test_vouching.py:test_only_witnesses_of_a_waiting_job_ask_for_room",
    ),
    _row(
        "Start a job on a node",
        ("witness that has won the term",),
        "may_start",
        "mesh/jobs/vouching.py:allows",
        f"{ASKED}:test_only_the_leader_starts_a_job",
    ),
    _row(
        "Enlist a node for a gang",
        (RUNNER,),
        "may_start",
        "mesh/jobs/vouching.py:allows",
        f"{ASKED}:test_only_the_runner_enlists_a_gang",
    ),
    _row(
        "Submit a job",
        ("member that may submit, as its own user",),
        "open_spec",
        f"{PARTICIPANT}:_on_accept",
        f"{ASKED}:test_description_is_signed_by_its_submitter",
    ),
    _row(
        "Have a node take on a job whose submitter's certificate has ended",
        ("two witnesses, and most of its present group",),
        "read_ended_spec, take_word",
        "mesh/jobs/vouching.py:allows",
        f"{ASKED}:test_job_outlives_the_certificate_of_its_submitter_by_the_word_of_its_witnesses",
    ),
    _row(
        "Cancel or migrate a job",
        (USER,),
        "may_cancel",
        f"{PARTICIPANT}:_on_cancel",
        f"{ASKED}:test_only_the_user_of_a_job_cancels_it",
        call="cancel",
    ),
    _row(
        "Say which checkpoints of a job its holders may forget",
        (WITNESS,),
        "witnesses_by",
        "mesh/jobs/vouching.py:words",
        "tests/checkpoints/test_retention.py:test_status_alone_has_nothing_forgotten",
    ),
    _row(
        "Say how a job ended, which starts or fails those that come after it",
        (WITNESS,),
        "witnesses_by",
        "mesh/jobs/vouching.py:words",
        "tests/jobs/test_awaited_ends.py:test_status_alone_ends_no_job_for_those_that_wait",
    ),
    _row(
        "Recover a job",
        (USER,),
        "read_recovery",
        f"{PARTICIPANT}:_on_accept",
        f"{ASKED}:test_only_the_user_of_a_job_recovers_it",
    ),
    _row(
        "Withdraw a submission from its keeper",
        ("its submitter",),
        "the sender",
        "mesh/jobs/submission_retry.py:release",
        "tests/jobs/test_submission_retry.py:test_only_the_submitter_releases_a_submission",
    ),
    _row(
        "Read the content of a data set",
        (
            "its owner, a reader, a member of a group that it names, or the runner of a job of one of them that names it",
        ),
        "may_read_data",
        "mesh/api/handlers/data.py:_may_read",
        f"{ASKED}:test_data_set_is_for_its_readers_and_runners_of_their_jobs",
    ),
    _row(
        "Have a node fetch an image",
        ("member whose user it accepts",),
        "may_order_image",
        f"{PEERS}:_fetch_image",
        f"{ASKED}:test_only_the_user_of_a_job_reads_enters_and_orders",
    ),
)


def table() -> list[str]:
    """Return the rows of the table in the docs."""

    def line(row: Row) -> str:
        who = ", ".join(sorted(row.who, key=lambda one: WHO.index(one) if one in WHO else 0)) or "nobody"
        return f"| {row.what} | {who} | `{row.decided}` | `{row.asked}` | `{row.test}` |"

    return [line(row) for row in MATRIX]


def exists(place: str, root: Path) -> bool:
    """Tell whether `file:function` names a function that is there."""
    path, _, name = place.partition(":")
    return f"def {name}(" in (root / path).read_text()


Calls = dict[str, Callable[..., object]]
