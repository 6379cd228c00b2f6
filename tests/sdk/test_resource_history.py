"""Resource history of functions: keyed by their code, the newest runs only, safe with several writers."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mesh.sdk.resource_history import KEPT, Needs, NeedsTable, code_hash


def make(source: str) -> object:
    space: dict[str, object] = {}
    exec(compile(source, "<made>", "exec"), space)
    return space["f"]


def test_code_hash_depends_on_behaviour_only() -> None:
    one = "def f(x):\n    return [y + 1 for y in x if y in {1, 2}]"
    assert code_hash(make(one)) == code_hash(make("# moved\n\n" + one)) == code_hash(partial(make(one), 3))  # type: ignore[arg-type]
    others = (one.replace("+ 1", "+ 2"), one.replace("return", "return 1,"), one.replace("for y in x", "for y in y"))
    codes = {code_hash(make(source)) for source in (one, *others)}
    codes |= {code_hash(make(one), "image"), code_hash(int), code_hash(len)}
    assert len(codes) == 7
    thing = make("class f:\n    def __call__(self):\n        return 1")
    assert code_hash(thing()) == code_hash(thing()) != code_hash(make(one))  # type: ignore[operator]


def test_resource_history_keeps_the_newest_runs(tmp_path: Path) -> None:
    table = NeedsTable(tmp_path / "needs.sqlite")
    assert table.of("a") == Needs(0, None, None) and not list(tmp_path.iterdir())
    assert table.of("a").gpu_terms() == {"gpus": 1}
    table.learn("a", "job", 9000, 1.0)
    table.learn("a", "job", 1, 1.0)
    assert table.of("a").gpu_terms() == {"gpus": 1, "vram": 10_800}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: table.learn("a", f"job{n}", n or None, float(n)), range(KEPT + 10)))
    found = table.of("a")
    assert found.runs == KEPT and found.vram_mib is not None and found.vram_mib < 9000 and table.of("b").runs == 0


def test_needs_are_the_most_memory_and_the_usual_time_of_one_code(tmp_path: Path) -> None:
    table = NeedsTable(tmp_path / "needs.sqlite")
    for number, (code, peak, ran_s) in enumerate((("a", 100, 1.0), ("a", 300, 9.0), ("a", None, 2.0), ("b", 900, 5.0))):
        table.learn(code, f"job{number}", peak, ran_s)
    assert table.of("a") == Needs(3, 300, 2.0) and table.of("c") == Needs(0, None, None)
    table.learn("d", "job9", None, 1.0)
    assert table.of("d").gpu_terms() == {"gpus": 1}, "nothing was measured"
    for number in range(KEPT + 5):
        table.learn("a", f"more{number}", 10, 1.0)
    assert table.of("a").runs == KEPT and table.of("b").runs == 1, "old runs of other codes stay"
