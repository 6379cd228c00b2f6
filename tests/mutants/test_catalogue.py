"""The catalogue of faults fits the tree, and a sample of it is found each day."""

import ast
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.mutants.catalogue import HERE, ROOT, catalogue, chosen, sample
from tests.mutants.runner import FOUND, judge_all

MUTANTS = catalogue()


@pytest.mark.parametrize("path", sorted(HERE.glob("*.toml")), ids=lambda path: path.stem)
def test_each_fault_fits_the_tree(path: Path) -> None:
    mutants = chosen(path.stem)
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in mutants}}
    codes = {file: ast.dump(ast.parse(text)) for file, text in texts.items() if file.endswith(".py")}
    for mutant in mutants:
        text = texts[mutant.file]
        assert text.count(mutant.old) == 1, (
            f"{mutant.name}: the text occurs {text.count(mutant.old)} times in {mutant.file}"
        )
        broken = text.replace(mutant.old, mutant.new)
        assert broken != text, f"{mutant.name} changes nothing"
        if mutant.file in codes:
            assert ast.dump(ast.parse(broken)) != codes[mutant.file], f"{mutant.name} changes no code"


def test_each_fault_has_a_name_of_its_own_and_tests_that_exist() -> None:
    names = Counter(mutant.name for mutant in MUTANTS) + Counter({mutant.area for mutant in MUTANTS})
    assert names.most_common(1)[0][1] == 1
    for mutant in MUTANTS:
        wanted = [*mutant.tests, *([mutant.sim] if mutant.sim else [])]
        assert wanted, f"{mutant.name} names no tests"
        for test in wanted:
            file, *names = test.split("::")
            text = (ROOT / file).read_text()
            assert not names or f"def {names[-1].partition('[')[0]}(" in text, f"{mutant.name} names {test}"


def test_todays_sample_of_faults_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole catalogue takes `make mutants` a long time."""
    today = sample(datetime.now(UTC).date())
    with capsys.disabled():
        print("faults of today:", ", ".join(mutant.name for mutant in today))
    for outcome in judge_all(today, 1, lambda outcome: None):
        again = f"python -m tests.mutants --only {outcome.name}"
        assert outcome.result == FOUND, f"{outcome.name} {outcome.result} ({outcome.by}). To repeat: {again}"
