"""The live table of `mesh demo` on a terminal."""

import io
from types import SimpleNamespace

from rich.console import Console

from mesh.cli.demo import _Live


def test_lines_stay_and_the_table_follows_the_nodes_and_the_job() -> None:
    screen = io.StringIO()
    live = _Live(Console(file=screen, force_terminal=True, width=120))
    nodes = [SimpleNamespace(nick="node1", running=True), SimpleNamespace(nick="node2", running=False)]
    commit = {"seq": 3, "step": 41, "holders": ["node2", "node3"]}
    job = {"node": "node1", "state": "running", "step": 44, "of": 90, "checkpoint": commit}
    live.say("[Errno 2] is not markup")
    live.draw(SimpleNamespace(nodes=nodes), job)  # type: ignore[arg-type]
    live.draw(SimpleNamespace(nodes=nodes), {})  # type: ignore[arg-type]
    live.close()
    shown = screen.getvalue()
    for text in ("[Errno 2] is not markup", "node1", "running", "44/90", "3 at step 41 on node2, node3", "gone"):
        assert text in shown
    assert shown.endswith("\x1b[?25h"), "the cursor is back"
