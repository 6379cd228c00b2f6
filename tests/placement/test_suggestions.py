"""Suggestions for waiting jobs: the filters accept each suggested change."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from placement.advert import Advert, Gpu, Portion
from placement.allocation import all_free
from placement.preemption import RunningJob
from placement.request import Request
from placement.suggestions import MOST, NamedJob, fits, suggest
from tests.placement.test_placement import JOB, NODES, advert

NOW = 1_000_000.0


@st.composite
def campuses(draw: st.DrawFn) -> tuple[list[Advert], list[NamedJob]]:
    adverts: list[Advert] = []
    running: list[NamedJob] = []
    for node in draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=5, unique=True)):
        model = draw(st.sampled_from(("RTX A6000", "RTX 3090", "T4")))
        sizes = draw(st.lists(st.sampled_from((1000, 2000, 4000)), max_size=3))
        gpus = tuple(
            Gpu(f"GPU-{node[0]}-{n}", model, size, draw(st.sampled_from(((7, 5), (8, 6)))))
            for n, size in enumerate(sizes)
        )
        free_gpus = list(all_free(gpus))
        for left in list(free_gpus):
            if draw(st.booleans()):
                free_gpus.remove(left)
                stay = RunningJob(b"%d" % len(running), node, 50, 0, True, (left,))
                running.append(NamedJob(stay, f"job {len(running)}", draw(st.none() | st.floats(60, 9999))))
            elif draw(st.booleans()):
                free_gpus[free_gpus.index(left)] = Portion(left.uuid, 40, left.vram_mib // 2)
        held = draw(st.sampled_from(("", "owner", "hours")))
        adverts.append(
            advert(
                node,
                gpus=gpus,
                free_portions=tuple(free_gpus),
                guards=draw(st.booleans()),
                lending=draw(st.booleans()),
                paused=draw(st.booleans()) or bool(held),
                held_by=held,
                back_unix=draw(st.sampled_from((0, int(NOW) + 3600))) if held == "hours" else 0,
                zone=draw(st.sampled_from(("", "a", "b"))),
                driver=draw(st.sampled_from(((), (535,), (550, 54)))),
                engines=draw(st.sampled_from((("process",), ("process", "docker"), ("docker",)))),
                slots_free=draw(st.integers(0, 1)),
                interactive=draw(st.booleans()),
            )
        )
    return adverts, running


@st.composite
def requests(draw: st.DrawFn) -> Request:
    gpus = draw(st.integers(0, 3))
    share = draw(st.sampled_from((100, 100, 30, 60))) if gpus else 100
    return Request(
        JOB,
        0,
        "ada",
        gpus=gpus,
        gpu_share=share,
        vram_mib=draw(st.sampled_from((0, 1500, 3000, 8000))) if gpus and share == 100 else 500 * (share < 100),
        zone=draw(st.sampled_from((None, None, "a", "c"))),
        engine=draw(st.sampled_from((None, "process"))),
        nodes=draw(st.integers(1, 2)),
        memory_mib=draw(st.sampled_from((None, 4096, 1 << 20))),
        gpu_model=draw(st.sampled_from(("", "", "a6000", "H200"))) if gpus else "",
        driver=draw(st.sampled_from(((), (550,)))) if gpus else (),
        interactive=draw(st.booleans()),
        exclude=draw(st.sampled_from(((), NODES[:1]))),
        on=draw(st.sampled_from(((), NODES[1:]))),
        not_on=draw(st.sampled_from(((), NODES[:2]))),
    )


@given(campuses(), requests())
def test_job_fits_after_suggested_change(campus: tuple[list[Advert], list[NamedJob]], request: Request) -> None:
    adverts, running = campus
    changes = suggest(request, adverts, running, NOW)
    assert suggest(request, adverts[::-1], running[::-1], NOW) == changes, (
        "the suggestions do not depend on the order of nodes"
    )
    assert not (fits(request, adverts) and changes)
    assert all(sum(change.of == kind for change in changes) <= MOST for kind in ("request", "campus"))
    for change in changes:
        assert fits(change.request, change.adverts)
        if change.of == "request":
            assert sorted(change.adverts, key=lambda ad: ad.node) == sorted(adverts, key=lambda ad: ad.node)
            changed = [
                name for name in request.__struct_fields__ if getattr(change.request, name) != getattr(request, name)
            ]
            assert len(changed) == 1 and change.request.user == request.user
        else:
            before = {ad.node: ad for ad in adverts}
            assert sum(before[ad.node] != ad for ad in change.adverts) <= 1


def test_suggests_smallest_change_of_each_kind() -> None:
    gpus = tuple(Gpu(f"GPU-{n}", "T4", size) for n, size in enumerate((1000, 2000, 4000)))
    busy = (Portion("GPU-2", 100, 4000),)
    there = [
        advert(NODES[0], gpus=gpus, free_portions=all_free(gpus)[:2]),
        advert(NODES[1], gpus=gpus, free_portions=all_free(gpus), paused=True),
        advert(
            NODES[2], gpus=gpus, free_portions=all_free(gpus), paused=True, held_by="hours", back_unix=int(NOW) + 7200
        ),
    ]
    running = [NamedJob(RunningJob(b"x", NODES[0], 50, 0, True, busy), "job 7", 1200.0)]
    request = Request(JOB, 0, "ada", gpus=3, vram_mib=900)
    assert [change.text for change in suggest(request, there, running, NOW)] == [
        "when job 7 on n1 ends (about 20 min)",
        "when n3 is lent again (in 2 h)",
        "if n2's owner resumes (`mesh lend` there)",
        "--gpus 2",
    ]
    large = msgspec.structs.replace(request, gpus=1, vram_mib=3000, zone="b")
    assert not suggest(large, there[:1], (), NOW), "no single change suffices"
    assert [change.text for change in suggest(msgspec.structs.replace(large, zone=None), there[:1], (), NOW)] == [
        "--vram 2000m"
    ]
