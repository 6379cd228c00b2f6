"""Why a node cannot take a job, in words. An empty answer means that it can."""

from placement.advert import Advert, HeldBy
from placement.allotment import fitting, suits, untouched
from placement.images import image_refusal
from placement.request import Request

PAUSED: dict[HeldBy, str] = {
    "": "its owner has paused lending",
    "owner": "its owner uses it now, and has paused lending",
    "hours": "is paused: it is lent at other hours",
}


def refusals(request: Request, advert: Advert) -> list[str]:
    reasons: list[str] = []
    if not advert.lending:
        reasons.append("does not lend (its owner runs `mesh up --lend` or `mesh resume`)")
    elif advert.paused:
        reasons.append(PAUSED[advert.held_by])
    if "*" not in advert.accepts and request.user not in advert.accepts and request.user != advert.user:
        reasons.append(f"takes jobs of {', '.join(advert.accepts) or advert.user} only, not of {request.user}")
    reasons += _engine_refusals(request, advert)
    if request.interactive and not advert.interactive:
        reasons.append("its owner allows no interactive sessions (interactive = false)")
    if request.zone is not None and advert.zone != request.zone:
        reasons.append(f"is in zone {advert.zone or 'none'}, not {request.zone}")
    if request.memory_mib is not None and advert.memory_mib < request.memory_mib:
        reasons.append(f"lends {advert.memory_mib} MiB of memory to a job, {request.memory_mib} asked")
    if request.cpus is not None and advert.cpus < request.cpus:
        reasons.append(f"lends {advert.cpus} CPUs to a job, {request.cpus} asked")
    reasons += _gpu_refusals(request, advert) if request.gpus else _slot_refusals(advert)
    if request.job and advert.node in request.exclude:
        reasons.append("failed this job a moment ago")
    return reasons


def engine_for(request: Request, advert: Advert) -> str | None:
    """The engine this node would use: the one asked for; else a container if an image is named; else its first."""
    usable = [name for name in advert.engines if name not in advert.own_only or request.user == advert.user]
    if request.engine is not None:
        return request.engine if request.engine in usable else None
    if request.image is not None:
        return "docker" if "docker" in usable else None
    return "process" if "process" in usable else None


def _engine_refusals(request: Request, advert: Advert) -> list[str]:
    wanted = request.engine or ("docker" if request.image is not None else "process")
    if engine_for(request, advert) is None:
        if wanted in advert.engines:
            return [
                f"runs only its owner's jobs with the {wanted} engine (no sandbox): name an image, or ask its owner"
            ]
        return [f"has no {wanted} engine"]
    if wanted == "docker":
        if request.image is None:
            return ["the docker engine needs an image: --image NAME"]
        system = advert.system.refusal(request.gpus > 0, request.like) if request.system else None
        return [reason for reason in (image_refusal(request, advert), system) if reason is not None]
    return []


def _gpu_refusals(request: Request, advert: Advert) -> list[str]:
    if len(advert.gpus) < request.gpus:
        return [f"has {len(advert.gpus)} GPUs, {request.gpus} asked"]
    now = len(fitting(request, advert.gpus, advert.room))
    shares = not request.is_share or (advert.gpu_sharing and advert.guards)
    if now >= request.gpus and shares and advert.driver >= request.driver:
        return []
    reason = _kind_refusal(request, advert)
    if reason is not None:
        return [reason]
    if request.is_share and not advert.gpu_sharing:
        return ["its owner lends whole GPUs only"]
    if not shares:
        return ["cannot keep a job to a share of a GPU"]
    ever = len(fitting(request, advert.gpus, untouched(advert.gpus)))
    if ever < request.gpus:
        largest = max(gpu.vram_mib for gpu in advert.gpus if suits(request, gpu))
        return [f"its GPUs have up to {largest} MiB, {request.vram_mib} MiB on {request.gpus} asked"]
    if request.is_share:
        wanted = f"{request.gpu_share} % and {request.vram_mib} MiB left"
        return [f"{now} of {ever} fitting GPUs have {wanted}, {request.gpus} asked"]
    return [f"{now} of {ever} fitting GPUs are free, {request.gpus} asked"]


def _kind_refusal(request: Request, advert: Advert) -> str | None:
    """Why its GPUs, or their driver, are not what is asked for."""
    if request.driver and advert.driver < request.driver:
        has = f"has driver {_dotted(advert.driver)}" if advert.driver else "does not say which driver it has"
        return f"{has}, {_dotted(request.driver)} asked"
    called = [gpu for gpu in advert.gpus if request.gpu_model.casefold() in gpu.model.casefold()]
    if len(called) < request.gpus:
        models = ", ".join(sorted({gpu.model for gpu in advert.gpus}))
        return f"has {len(called)} GPUs called {request.gpu_model} (it has {models}), {request.gpus} asked"
    if sum(gpu.capability >= request.capability for gpu in called) < request.gpus:
        newest = max(gpu.capability for gpu in called)
        wanted = _dotted(request.capability)
        return f"its GPUs have compute capability {_dotted(newest)} at most, {wanted} on {request.gpus} asked"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _slot_refusals(advert: Advert) -> list[str]:
    if advert.slots == 0:
        return ["takes only GPU jobs"]
    return [] if advert.slots_free > 0 else [f"all {advert.slots} job slots are taken"]
