"""Break one rule of safety at a time and list those that no test notices: `python -m tests.mutants`, or `make mutants`."""

import sys
from collections import Counter

import click
import msgspec

from tests.mutants.catalogue import ROOT, chosen
from tests.mutants.runner import FOUND, LEFT_OUT, Outcome, judge_all

REPORT = ROOT / "build" / "mutants.json"


@click.command()
@click.option("--only", default="", help="Areas or names of faults, separated by commas.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Faults to try at the same time.")
@click.option("--json", "as_json", is_flag=True, help=f"Write the outcomes to {REPORT.relative_to(ROOT)}.")
def main(only: str, jobs: int, as_json: bool) -> None:
    """Apply each fault of the catalogue to a copy of the tree and run the tests that should notice it.

    Exits with 1 if a fault survives or does not fit the tree.
    """
    try:
        mutants = chosen(only)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    done = Counter[str]()

    def report(outcome: Outcome) -> None:
        done[outcome.result] += 1
        click.echo(
            f"{done.total()}/{len(mutants)} {outcome.area} {outcome.name}: {outcome.result} in {outcome.seconds} s {outcome.by}",
            err=True,
        )

    outcomes = judge_all(mutants, jobs, report)
    if as_json:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
    click.echo(f"{done[FOUND]} of {len(mutants)} faults found")
    for outcome in outcomes:
        if outcome.result != FOUND:
            click.echo(f"{outcome.result}: {outcome.area} {outcome.name} {outcome.by}")
    sys.exit(any(outcome.result not in {FOUND, LEFT_OUT} for outcome in outcomes))


if __name__ == "__main__":
    main()
