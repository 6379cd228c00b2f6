"""The owner's policy file: valid settings, and errors that name the wrong key."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.provider.hours import ALWAYS, parse_hours
from mesh.provider.policy import MOST_BYTES, Clocks, Policy, PolicyError, never_lends, read_policy, with_hours

WHOLE = """
# what my students must not break
hours = "Mon-Fri 20-08; Sat-Sun"

[gpu]
after = "1s"
ignore = ["Xorg"]

[keyboard]
watch = "console"
suspend = "5m"
resume = 60
idle = "1h30m"

[load]
above = 2.5

[calendar]
idle = "10m"

[reclaim]
notice = "1m"
pause = 20
"""


def test_full_policy_is_parsed() -> None:
    policy = read_policy(WHOLE)
    assert policy.hours == parse_hours("Mon-Fri 20-08; Sat-Sun") and policy.gpu and policy.ignore == ("Xorg",)
    assert policy.keyboard == "console" and policy.keyboard_clocks == Clocks(0.0, 300.0, 60.0, 5400.0)
    assert policy.load == 2.5 and policy.load_clocks == Policy().load_clocks
    assert (policy.gpu_clocks.after, policy.calendar_clocks.idle) == (1.0, 600.0)
    assert (policy.notice, policy.pause) == (60.0, 20.0) and never_lends(policy) == []
    assert str(policy.hours) == "Mon-Thu 20:00-08:00; Fri 20:00-24:00; Sat-Sun 00:00-24:00"


def test_docs_example_is_the_default() -> None:
    """Compare the example in docs/reference/policy.md with the default policy and all sources watched."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "policy.md").read_text()
    told = read_policy(page.partition("```toml\n")[2].partition("```")[0])
    bare = msgspec.structs.replace(
        Policy(), keyboard="all", load=1.0, memory_wait=10.0, notice=30.0, ignore=told.ignore
    )
    assert told == bare and set(told.ignore) < set(Policy().ignore)


def test_empty_policy_watches_gpu_only() -> None:
    assert read_policy("") == Policy() and Policy().hours == ALWAYS
    assert (Policy().gpu, Policy().keyboard, Policy().load) == (True, "off", None) and never_lends(Policy()) == []
    assert read_policy("[keyboard]").keyboard == "all" and read_policy("[load]").load == 1.0
    assert Policy().memory_wait is None and read_policy("[load]").memory_wait == 10.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('hours = "Mon-Fri 20"', r"hours: 'Mon-Fri 20': '20' is not a range"),
        ("hours = 7", r"hours: expected"),
        ("[gpu]\nafter = '5x'", r"gpu.after: '5x' is not a duration"),
        ("[gpu]\nafter = -1", r"gpu.after: -1 is not a duration"),
        ("[gpu]\nafter = nan", r"gpu.after: nan is not a duration"),
        ("[gpu]\nafter = 1" + "0" * 400, r"gpu.after: "),
        ("[gpu]\nidel = '5m'", r"gpu.idel: unknown key"),
        ("hour = '5m'", r"^hour: unknown key"),
        ("[keyboard]\nwatch = 'mouse'", r"keyboard.watch: invalid enum value 'mouse'"),
        ("[load]\nabove = 'much'", r"load.above: expected"),
        ("[load]\nabove = -1.0", r"load.above: -1 is not a number of cores"),
        ("[load]\nabove = 1e6", r"load.above: 1e\+06 is not a number of cores"),
        ("[load]\nmemory_wait = 0", r"load.memory_wait: 0 is not a percentage"),
        ("[load]\nmemory_wait = 100.5", r"load.memory_wait: 100.5 is not a percentage"),
        ("[load]\nmemory_wait = nan", r"load.memory_wait: nan is not a percentage"),
        ("[reclaim]\npause = true", r"reclaim.pause: expected"),
        ("[reclaim]\npause = '5x'", r"reclaim.pause: '5x' is not a duration"),
        ("[gpu]\nidle = '31d'", r"gpu.idle: 31d is not a duration of 0 to 30d"),
        ("[reclaim", r"at end of document"),
        ("x" * 70_000, r"more than"),
        ("hours = " + "[" * 5000, r"."),
    ],
)
def test_policy_error_names_key(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        read_policy(text)


@given(st.text(max_size=200) | st.text(alphabet="hours=[]gpu\n\"'.0123456789 \tabcdefinty", max_size=200))
def test_policy_parser_accepts_or_raises(text: str) -> None:
    try:
        assert isinstance(read_policy(text), Policy)
    except PolicyError as error:
        assert str(error)


@pytest.mark.parametrize("before", ["", WHOLE, "[gpu]\nwatch = false", "'hours' = 'Sat'\n[load]\n"])
@pytest.mark.parametrize("hours", ["Sun 0-6", "always", "never"])
def test_with_hours_changes_hours_only(before: str, hours: str) -> None:
    after = with_hours(before, (hours,))
    assert read_policy(after) == msgspec.structs.replace(read_policy(before), hours=parse_hours(hours))
    kept = [line for line in before.splitlines() if "hours" not in line]
    assert [line for line in after.splitlines() if "hours" not in line] == kept


def test_multi_line_hours_are_refused() -> None:
    with pytest.raises(PolicyError, match="edit the file instead"):
        with_hours('hours = [\n  "Sat",\n]\n', ("Sun",))
    with pytest.raises(PolicyError, match=r"gpu.x: unknown key"):
        with_hours("[gpu]\nx = 1", ("Sun",))
    with pytest.raises(PolicyError, match="not a day"):
        with_hours("", ("Someday",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hours = 'never'", "never lends: hours is never"),
        ("hours = 'Sat 1-3'\n[calendar]\nidle = '2h'", "calendar.idle is 2h, and hours are never longer than 2h"),
        (
            "hours = 'Sat 1-3; Sun 1-3'\n[calendar]\nidle = '2h'",
            "calendar.idle is 2h, and hours are never longer than 2h",
        ),
        ("[load]\nabove = 0", "load.above is 0"),
        ("[keyboard]\nidle = '7d'", "keyboard.idle is 7d"),
        ("[keyboard]\nidle = '8d'", "keyboard.idle is 8d"),
        ("[keyboard]\nsuspend = '1m'", "stopped guests never resume in place"),
        ("[load]\nmemory_wait = 5\nidle = '8d'", "load.idle is 8d"),
    ],
)
def test_policy_without_lending_is_warned_about(text: str, words: str) -> None:
    (told,) = never_lends(read_policy(text))
    assert words in told


def test_load_that_counts_from_none_on_is_watched() -> None:
    assert len(never_lends(read_policy("[load]\nabove = 0\nidle = '8d'"))) == 2


def test_unwatched_source_is_not_warned_about() -> None:
    assert never_lends(read_policy("[gpu]\nwatch = false\nidle = '20d'")) == []
    assert never_lends(read_policy("[keyboard]\nwatch = 'off'\nidle = '20d'")) == []


def test_guest_that_resumes_or_whose_machine_is_idle_before_it_is_sent_away_is_not_warned_about() -> None:
    for suspend, resume, idle, warned in ((5, 4, 9, False), (5, 5, 9, True), (5, 9, 4, False), (0, 9, 9, False)):
        text = f"[gpu]\nsuspend = '{suspend}m'\nresume = '{resume}m'\nidle = '{idle}m'"
        assert bool(never_lends(read_policy(text))) is warned, text


def test_settings_may_reach_their_bounds() -> None:
    text = "[gpu]\nidle = '30d'\nignore = []\n[load]\nmemory_wait = 100\n#"
    policy = read_policy(text + "#" * (MOST_BYTES - len(text)))
    assert (policy.gpu_clocks.idle, policy.memory_wait, policy.ignore) == (30 * 86_400, 100, ())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('hours = "Sat"\n', 'hours = "Sun 00:00-24:00"\n'),
        ('"hours" = "Sat"\n  [gpu]\nidle = 1\n', 'hours = "Sun 00:00-24:00"\n  [gpu]\nidle = 1\n'),
        (
            '[gpu]\nignore = ["""\nhours = 1\n"""]\n',
            'hours = "Sun 00:00-24:00"\n[gpu]\nignore = ["""\nhours = 1\n"""]\n',
        ),
        (
            '  [gpu]\nignore = ["""\nhours = 1\n"""]\n',
            'hours = "Sun 00:00-24:00"\n  [gpu]\nignore = ["""\nhours = 1\n"""]\n',
        ),
    ],
)
def test_line_of_the_hours_alone_is_replaced(before: str, after: str) -> None:
    assert with_hours(before, ("Sun",)) == after
    assert with_hours(after, ("always",)) == after.partition("\n")[2]


def test_hours_that_would_change_another_setting_are_refused() -> None:
    with pytest.raises(PolicyError, match="edit the file instead"):
        with_hours('gpu = { ignore = ["""\nhours = 1\n"""] }\n', ("Sun",))
