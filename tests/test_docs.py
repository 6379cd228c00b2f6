"""The documentation site as `make docs` builds it: complete, from the checkout alone, readable without a network."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click import Context, Group, exceptions

from ckptstore import manifest, store
from membership import (
    admission,
    core,
    lengths,
    listener,
    node,
    probe,
    ratelimit,
    reconcile,
    records,
    relay,
    streams,
    trust,
    wire,
)
from membership.config import SwimConfig
from membership.ratelimit import BURST_S
from mesh.api.handlers import peers
from mesh.checkpoints import key_shares
from mesh.cli import output
from mesh.cli.main import SECTIONS, cli
from mesh.consensus import messages, participant
from mesh.daemon.config import Settings
from mesh.jobs import input_queue, vouching
from mesh.rpc import client, memory, server

ROOT = Path(__file__).parents[1]
HEAD = "\n| what | bound | test |\n|---|---|---|\n"  # of a table of bounds
FETCHED = re.compile(
    r"<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+", re.IGNORECASE
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A dead link, a dead anchor or a missing public name fails the build."""
    where = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(where)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return where


def test_site_menu_links_every_page(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert all((site / page).exists() for page in pages)
    home = (site / "reference" / "cli.html").read_text()
    links = {os.path.normpath(Path("reference") / link) for link in re.findall(r'href="([^"#:]+\.html)', home)}
    assert {str(page) for page in pages} <= links, "each page is linked from the menu"


def test_site_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = [tag for tag in FETCHED.findall(page.read_text()) if 'rel="canonical"' not in tag]
        assert not fetched, f"{page.name}: {fetched}"


def test_reference_is_generated_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"mesh {name}" in commands for rows in SECTIONS.values() for name, _, _ in rows)
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"<code>{field.name}</code>" in settings for field in msgspec.structs.fields(Settings))
    assert "should_checkpoint" in (site / "reference" / "python.html").read_text()


def test_benchmark_page_has_every_benchmark(site: Path) -> None:
    wanted = set(re.findall(r"^(bench-[a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    collected = (site / "explanation" / "benchmarks.html").read_text()
    assert wanted
    assert all(f"<code>make {name}</code>" in collected for name in wanted)
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    measured = [page for page in pages if "\n## Measured\n" in (ROOT / "docs" / page).read_text()]
    links = [os.path.relpath(page.with_suffix(".html"), "explanation") for page in measured]
    assert measured
    assert all(f'From <a href="{link}#measured">' in collected for link in links)


def test_files_named_in_pages_exist() -> None:
    """Check paths such as `mesh/jobs` in pages. `mesh/v1` is the prefix of signature contexts, not a path."""
    named = re.compile(
        r"(?<![\w/.-])((?:mesh|membership|placement|ckptstore|cuda_guard|sim|tests)/(?!v1)[\w./-]*\w)(?![\w{*-])"
    )
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    gone = {
        f"{page.name}: {path}"
        for page in pages
        for path in named.findall(page.read_text())
        if not (ROOT / path).exists()
    }
    assert not gone, f"these pages name files that do not exist: {gone}"


def test_functions_named_in_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    hops = re.findall(r"`([\w/]+\.py):(\w+)`", page)
    assert len(hops) > 15
    gone = [hop for hop in hops if not re.search(rf"def {hop[1]}\(", (ROOT / hop[0]).read_text())]
    assert not gone, f"architecture.md names functions that do not exist: {gone}"


def test_each_bound_names_tests_that_exist() -> None:
    """Check the tables of bounds: a name without a file belongs to the one that the text before the table names."""
    named = re.compile(r"`(?:(tests/[\w/]+\.py)(?::|`))?(test_\w+)?`?")
    rows = 0
    for page in (ROOT / "docs").rglob("*.md"):
        before, *tables = page.read_text().split(HEAD)
        for table in tables:
            inside = re.findall(r"Tests without a file are in `(tests/[\w/]+\.py)`", before)
            for line in table.partition("\n\n")[0].splitlines():
                rows += 1
                cell = line.strip(" |").rpartition("|")[2]
                tests = [(file or inside[-1], name) for file, name in named.findall(cell) if file or name]
                assert tests, f"{page.name}: no test: {line}"
                for file, name in tests:
                    assert f"def {name}" in (ROOT / file).read_text(), f"{page.name}: {file}:{name}"
            before += table
    assert rows > 30


def size(count: int) -> str:
    """Return a number of bytes as the pages write it."""
    unit = next(name for name in ("GiB", "MiB", "KiB") if count >= UNITS[name])
    return f"{count / UNITS[unit]:g} {unit}"


UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
LAN = SwimConfig.lan()
BOUNDS: dict[str, list[str]] = {
    "members": [str(LAN.max_members)],
    "nodes with sections, sections of one": [
        str(records.MAX_NODES),
        str(records.MAX_SECTIONS),
        size(records.MAX_BODY_BYTES),
    ],
    "sections of all nodes of one user, ": [size(records.MAX_USER_DIGEST_BYTES), size(records.MAX_USER_BYTES)],
    "sealed record": [size(records.MAX_RECORD_BYTES)],
    "sealed evidence": [f"{wire.MAX_EVIDENCE_BYTES} bytes"],
    "unknown nodes with evidence": [str(core.MAX_UNKNOWN)],
    "relays": [str(probe.MAX_RELAYS)],
    "connections that have sent nothing": [
        str(listener.MAX_UNSORTED),
        f"{listener.MAX_UNSORTED_PER_HOST} of one",
        f"{listener.FIRST_BYTE_S:g} s",
    ],
    "streams of members": [f"{streams.MAX_SERVED} at once", f"{streams.MAX_SERVED_PER_HOST} from one"],
    "bytes of frames until ": [
        f"{size(streams.STRANGER_BYTES_S)} a second",
        f"{size(reconcile.FRAME_LIMIT)} at once",
        size(streams.FRAME_COST_BYTES),
    ],
    "bytes of frames of a member": [f"{size(streams.MEMBER_BYTES_S)} a second"],
    "frame of a node that is no member yet": [size(reconcile.STRANGER_FRAME_BYTES)],
    "packets over UDP": [f"{LAN.source_packets_s:g} per second", f"{LAN.source_packets_s * BURST_S:g} at once"],
    "records and evidence of a push-pull": [
        size(reconcile.DELTA_BYTES),
        f"{reconcile.MAX_EVIDENCE} in a frame",
        f"{core.SLICE} at a time",
    ],
    "records and evidence that a member sends": [f"{core.ITEMS_S:g} a second", f"{core.MAX_ITEMS:,} at once"],
    "packets over TCP": [f"{LAN.packet_bytes} bytes", f"{node.MAX_STREAMING} at a time"],
    "connections to all these ports": [
        f"{relay.MAX_JOINED}, {relay.MAX_JOINED_PER_HOST} of one",
        f"{relay.ANSWER_S:g} s",
    ],
    "connections that a relay tells": [f"{relay.WAITING_S:g} a second, {relay.WAITING_S * BURST_S:g} at once"],
    "push-pulls that unsigned packets cause": [
        f"{LAN.reconcile_pause_s:g} s",
        f"last {ratelimit.MAX_ADDRESSES} addresses",
        f"{node.MAX_UNPROVEN} at a time, of {node.MAX_RECONCILES}",
    ],
    "join requests": [f"{admission.REQUESTS_PER_S:g} a second"],
    "pending join requests of strangers": [f"{admission.MAX_PENDING}, {admission.MAX_PENDING_PER_ADDRESS} from"],
    "pending join requests with invites": [f"{admission.MAX_INVITED}, {admission.MAX_INVITED_PER_ISSUER} of"],
    "endorsements of a member": [f"{admission.MAX_ENDORSED}, {admission.MAX_MACHINES}"],
    "keys that a member came in through": [str(trust.MAX_THROUGH)],
    "revocations and promotions": [str(trust.MAX_STATEMENTS)],
    "handshakes that are not finished": [
        f"{server.MAX_HANDSHAKES}, {server.MAX_HANDSHAKES_PER_HOST} of one",
        f"{server.HANDSHAKE_S:g} s",
    ],
    "handshakes that begin": [
        f"{server.PER_HOST_S:g} per second",
        f"{server.PER_HOST_S * BURST_S:g} at once",
        f"{server.STRANGERS_S:g} per second, {server.STRANGERS_S * BURST_S:g} at once",
    ],
    "connections of a member": [f"{server.MAX_PER_PEER}; of all {server.MAX_CONNECTIONS}"],
    "requests of a member at a time": [str(memory.MAX_REQUESTS_PER_PEER)],
    "bodies and large answers in memory": [
        f"{size(peers.PEER_BYTES)} of one member, {size(2 * peers.PEER_BYTES)} of all",
        f"{server.ANSWER_S:g} s",
    ],
    "jobs of one user that a node witnesses": [size(participant.OF_A_USER_BYTES), size(participant.LEAST_BYTES)],
    "job messages of a member": [str(input_queue.OF_PEER), f"{input_queue.ROOM_S:g} s"],
    "fields of job messages": [
        f"{lengths.MOST_ID} bytes",
        f"{lengths.MOST_TEXT:,} characters",
        f"at most {lengths.SAID:,}",
        f"{lengths.MOST_LISTED:,} entries",
        size(messages.MAX_MESSAGE_BYTES),
    ],
    "shares of a key in an answer": [str(key_shares.MAX_SHARES)],
    "uploads of chunks": [f"{peers.UPLOADS_PER_PEER} of one", f"{peers.UPLOADS} of all"],
    "time for which slow requests": [f"{memory.WINDOW_S:g} to {2 * memory.WINDOW_S:g} s"],
    "answer that a caller reads whole": [size(client.ANSWER_BYTES), size(manifest.MAX_MANIFEST_BYTES)],
    "descriptors": [f"leave {server.FILES_KEPT}"],
    "bytes of one": [size(manifest.MAX_MANIFEST_BYTES)],
    "chunks and files of one": [f"{manifest.MAX_CHUNKS:,}", f"{manifest.MAX_FILES:,}"],
    "decoded, in memory": [f"{store.KNOWN_MANIFESTS:,}", size(store.KNOWN_BYTES)],
    "working directories of another user": [f"{store.WORKDIRS:,}", size(store.WORKDIR_BYTES)],
    "remembered answers, groups and descriptions": [f"{vouching.REMEMBERED:,} of each"],
    "a line that a command prints; a cell": [f"{output.LINE:,} characters; {output.CELL}"],
}


@pytest.mark.parametrize("start", BOUNDS)
def test_bound_in_a_page_is_that_of_the_code(start: str) -> None:
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    tables = [table for page in pages for table in page.split(HEAD)[1:]]
    rows = [row for table in tables for row in table.partition("\n\n")[0].splitlines() if row.startswith(f"| {start}")]
    cells = [row.split(" | ")[1] for row in rows]
    assert any(
        all(re.search(rf"(?<![\d,.]){re.escape(bound)}(?![\d])", cell) for bound in BOUNDS[start]) for cell in cells
    ), (
        BOUNDS[start],
        cells,
    )


def test_pages_named_in_code_exist() -> None:
    folders = ("mesh", "membership", "placement", "ckptstore", "cuda_guard", "sim", "tests", ".ci")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {"", ".py", ".c", ".h", ".toml"}
    ]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    named = re.compile(r"\b(docs/[\w/-]+\.(?:md|json|py|svg|png))\b")
    texts = {path: path.read_text(errors="ignore") for path in files if path.is_file()}
    gone = {
        f"{path.name}: {page}"
        for path, text in texts.items()
        for page in named.findall(text)
        if not (ROOT / page).exists()
    }
    assert not gone, f"these files name pages that do not exist: {gone}"


def test_commands_named_in_pages_exist() -> None:
    """Check `mesh COMMAND` and `mesh GROUP COMMAND` in code of pages."""
    code = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
    called = re.compile(r"(?:^|[\s`$|(])mesh (?!import\b)([a-z][a-z-]+)(?![\w-])(?: ([a-z][a-z-]+)(?![\w-]))?")
    gone = set()
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        for span in code.findall(page.read_text()):
            for name, second in called.findall(span):
                command = cli.get_command(Context(cli), name)
                inner = isinstance(command, Group) and second and command.get_command(Context(command), second) is None
                if command is None or (inner and not command.invoke_without_command):
                    gone.add(f"{page.name}: mesh {name} {second}".rstrip())
    assert not gone, f"these pages name commands that do not exist: {sorted(gone)}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_each_command_of_a_page_has_the_options_that_it_gives(page: Path) -> None:
    for block in re.findall(r"```(?:console)?\n(.*?)```", page.read_text(), re.DOTALL):
        for line in re.findall(r"^(?:\w*\$ )?(?:\w+=\S+ )*mesh (.*)", block, re.MULTILINE):
            words = shlex.split(re.split(r" [>|&;]", line)[0], comments=True)
            command, context = cli, Context(cli)
            try:
                while isinstance(command, Group) and words:
                    _, command, words = command.resolve_command(context, words)
                    context = Context(command, parent=context)
                command.make_parser(context).parse_args(words)
            except exceptions.UsageError as error:
                pytest.fail(f"mesh {line}: {error.format_message()}")
            except exceptions.Exit:  # `mesh --version`
                pass
