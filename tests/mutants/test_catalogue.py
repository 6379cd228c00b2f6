"""The catalogue of faults fits the tree, and a sample of it is found each day."""

import ast
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutants.catalogue import HERE, ROOT, Mutant, catalogue, chosen, sample
from tests.mutants.runner import BROKEN, FOUND, Run, Tree, judge_all


def statements(text: str) -> dict[str, ast.stmt]:
    """Return the statements of a module and of its classes by their lines. A class itself has no body here."""
    lines, found = text.splitlines(), dict[str, ast.stmt]()
    left = list(ast.parse(text).body)
    while left:
        part = left.pop()
        last = part.end_lineno
        if isinstance(part, ast.ClassDef):
            left += part.body
            last, part.body = part.body[0].lineno - 1, []
        decorators: list[ast.expr] = getattr(part, "decorator_list", [])
        found["\n".join(lines[min(node.lineno for node in (part, *decorators)) - 1 : last])] = part
    return found


def changes_code(mutant: Mutant, text: str, before: dict[str, ast.stmt]) -> bool:
    """Return whether a fault changes the code, and not only its layout or comments. `before`: the statements of `text`.

    The module is parsed again only if the fault is not inside one statement.
    """
    whole = [lines for lines in before if mutant.old in lines]
    if len(whole) == 1:
        with suppress(SyntaxError):  # the head of a class, or a mistake in the catalogue
            broken = ast.parse(dedent(whole[0].replace(mutant.old, mutant.new)))
            return ast.dump(broken) != ast.dump(ast.parse(dedent(whole[0])))
    after = statements(text.replace(mutant.old, mutant.new))
    old, new = before.keys() - after.keys(), after.keys() - before.keys()
    return {ast.dump(before[lines]) for lines in old} != {ast.dump(after[lines]) for lines in new}


@pytest.mark.parametrize("path", sorted(HERE.glob("*.toml")), ids=lambda path: path.stem)
def test_each_fault_fits_the_tree(path: Path) -> None:
    mutants = chosen(path.stem)
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in mutants}}
    codes = {file: statements(text) for file, text in texts.items() if file.endswith(".py")}
    for mutant in mutants:
        text = texts[mutant.file]
        assert text.count(mutant.old) == 1, (
            f"{mutant.name}: the text occurs {text.count(mutant.old)} times in {mutant.file}"
        )
        assert mutant.old != mutant.new, f"{mutant.name} changes nothing"
        if mutant.file in codes:
            assert changes_code(mutant, text, codes[mutant.file]), f"{mutant.name} changes no code"


def test_each_fault_has_a_name_of_its_own_and_tests_that_exist() -> None:
    mutants = catalogue()
    names = Counter(mutant.name for mutant in mutants) + Counter({mutant.area for mutant in mutants})
    assert names.most_common(1)[0][1] == 1
    for mutant in mutants:
        wanted = [*mutant.tests, *([mutant.sim] if mutant.sim else [])]
        assert wanted, f"{mutant.name} names no tests"
        for test in wanted:
            file, *names = test.split("::")
            text = (ROOT / file).read_text()
            assert not names or f"def {names[-1].partition('[')[0]}(" in text, f"{mutant.name} names {test}"


def test_pytest_that_does_not_start_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = sample(datetime.now(UTC).date())[:1]
    for output, result in (
        ("ModuleNotFoundError: No module named 'pytest'", BROKEN),
        ("FAILED tests/x.py::y - z", FOUND),
    ):
        monkeypatch.setattr(Tree, "run", lambda *asked, output=output, **more: Run(1, output))
        assert [one.result for one in judge_all(fault, 1, lambda outcome: None, unbroken=False)] == [result]


def test_todays_sample_of_faults_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole catalogue takes `make mutants` a long time. Without faults, the rest of this suite runs their tests."""
    today = sample(datetime.now(UTC).date())
    with capsys.disabled():
        print("faults of today:", ", ".join(mutant.name for mutant in today))
    for outcome in judge_all(today, 1, lambda outcome: None, unbroken=False):
        again = f"python -m tests.mutants --only {outcome.name}"
        assert outcome.result == FOUND, f"{outcome.name} {outcome.result} ({outcome.by}). To repeat: {again}"
