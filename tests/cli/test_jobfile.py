"""Job files: fields match the options, options override the file, and each error names its line."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.cli.job_file import JobCommand, job_file, printed_file, read_job
from mesh.cli.job_options import job_options, make_order
from mesh.cli.main import cli

WHOLE = """\
name: bert
command: python3 train.py --out $MESH_OUT_DIR
workdir: code
gpus: 2
vram: 20g
nodes: 2..4
env: {SEED: 7, ON: on, NOTHING: ""}
ckpt: ckpts
ckpt-to: [alice-desk, lab-nas]
retry-on: [75, 85]
after: first
deadline: 2030-01-01T08:00
array: 1,3,7%2
no-workdir: false
"""


def order(*words: str) -> tuple[dict[str, Any], str]:
    """Return the submission of a command line and the job file made of it."""
    seen: dict[str, Any] = {}

    @click.command(cls=JobCommand)
    @job_file
    @job_options
    @click.option("--out")
    @click.pass_context
    def submit(
        ctx: click.Context, /, command: tuple[str, ...], out: str | None, print_file: bool, **options: Any
    ) -> None:
        seen.update(make_order(command, options), out=out)
        click.echo(printed_file(ctx), nl=False)

    done = CliRunner().invoke(submit, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return seen, done.stdout


def test_job_file_has_the_fields_of_the_options(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(WHOLE)
    asked, printed = order("-f", str(file))
    assert asked["argv"] == ["sh", "-c", "python3 train.py --out $MESH_OUT_DIR"]
    assert (asked["name"], asked["gpus"], asked["vram_mib"]) == ("bert", 2, 20_480)
    assert (asked["least_nodes"], asked["most_nodes"], asked["retry_on"], asked["after"]) == (2, 4, [75, 85], ["first"])
    assert asked["env"] == {"SEED": "7", "ON": "on", "NOTHING": ""} and asked["ckpt_to"] == ["alice-desk", "lab-nas"]
    assert asked["array"] == [1, 3, 7] and asked["array_limit"] == 2
    assert asked["workdir"] == str(tmp_path / "code"), "paths are relative to the file"
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert order("-f", str(again))[0] == asked


def test_option_overrides_job_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(WHOLE)
    asked, printed = order("--gpus", "1", "--env", "SEED=8", "-f", str(file), "--", "true")
    assert (asked["gpus"], asked["env"], asked["argv"], asked["name"]) == (1, {"SEED": "8"}, ["true"], "bert")
    assert "gpus: 1\n" in printed and "- 'true'" in printed


@settings(max_examples=40, deadline=None)
@given(
    words=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=4),
    name=st.text(st.characters(codec="utf-8"), max_size=12),
    env=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="="), min_size=1, max_size=6),
        st.text(st.characters(codec="utf-8"), max_size=8),
        max_size=3,
    ),
)
def test_printed_job_file_round_trips(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], name: str, env: dict[str, str]
) -> None:
    options = [word for key, value in env.items() for word in ("--env", f"{key}={value}")]
    asked, printed = order(f"--name={name}", *options, "--", *words)
    file = tmp_path_factory.mktemp("file") / "job.yaml"
    file.write_bytes(printed.encode())
    again, _ = order("-f", str(file))
    assert again == asked


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("command: x\ngpu: 1\n", 2, "there is no key 'gpu': did you mean 'gpus'?"),
        ("command: x\nqqqq: 1\n", 2, " submit --help` lists them, without their dashes"),
        ("command: x\nckpt_every: 5m\n", 2, "did you mean 'ckpt-every'?"),
        ("command: x\ngpus: many\n", 2, "gpus: 'many' is not a valid integer"),
        ("command: x\ngpus: [1]\n", 2, "gpus must be one value, not a list or a mapping"),
        ("command: x\nvram: 12q\n", 2, "write 6g, 512m or a number of MiB"),
        ("command: x\ngpus: 1\ngpus: 2\n", 3, "gpus is set twice"),
        ("command: x\nno-workdir: yes\n", 2, "no-workdir must be true or false"),
        ("command: {a: b}\n", 1, "command must be a line or a list of words"),
        ("command: x\nname:\n", 2, "name has no value"),
        ("command: x\nenv:\n  A: [1]\n", 3, "env must be one value"),
        ("command: x\nenv: {A: 1, A: 2}\n", 2, "env has a name twice"),
        ("command: x\n[1]: 2\n", 2, "this is no key"),
        ("command: x\n  gpus: 1\n", 2, "mapping values are not allowed here"),
        ("command: x\n\tgpus: 1\n", 2, "found character"),
        ("command: x\nprint-file: true\n", 2, "there is no key 'print-file'"),
    ],
)
def test_job_file_error_names_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    done = CliRunner().invoke(cli, ["--state", str(tmp_path), "submit", "-f", str(file)])
    assert done.exit_code == 2
    assert f"{file}:{line}: " in done.stderr and words in done.stderr, done.stderr


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=60) | st.text(":{}[]-&*!|>'\"%@`# \n\tgpus1command", max_size=40).map(str.encode))
def test_job_file_parser_accepts_or_raises(data: bytes) -> None:
    ctx = click.Context(click.command()(job_options(lambda **_: None)), info_name="submit")
    try:
        assert isinstance(read_job(ctx, data, "job.yaml", Path("/")), dict)
    except click.UsageError as error:
        assert error.message.startswith("job.yaml")


def test_deeply_nested_job_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("command: " + "[" * 20_000)
    done = CliRunner().invoke(cli, ["--state", str(tmp_path), "submit", "-f", str(file)])
    assert done.exit_code == 2 and "nested too deeply" in done.stderr
