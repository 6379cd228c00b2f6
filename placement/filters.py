"""Filters: the reasons why a node cannot take a job.

An image is requested by its content (the hash of its configuration) if the mesh has a list of images, else by its name. Adverts
hold only prefixes of hashes; the node that starts the image compares the whole hash.
"""

import msgspec

from placement.advert import Advert, HeldBy
from placement.allocation import all_free, fitting_gpus, matches
from placement.request import Request

IMAGE_ENGINES = ("docker", "apptainer")  # the first that a node has runs a job with an image
SHORT = 8  # bytes of a hash in an advert

PAUSED: dict[HeldBy, str] = {
    "": "its owner has paused lending",
    "owner": "its owner uses it now, and has paused lending",
    "hours": "is paused: it is lent at other hours",
}

FAILED_HERE = "failed this job a moment ago"


def refusals(request: Request, advert: Advert) -> list[str]:
    """Return the reasons why the node cannot take the job; none if it can."""
    reasons: list[str] = []
    if not advert.lending:
        reasons.append("does not lend (its owner runs `mesh up --lend` or `mesh lend`)")
    elif advert.paused:
        reasons.append(PAUSED[advert.held_by])
    if "*" not in advert.accepts and request.user not in advert.accepts and not is_own(request, advert):
        reasons.append(f"takes jobs of {', '.join(advert.accepts) or advert.user} only, not of {request.user}")
    reasons += _engine_refusals(request, advert)
    if request.only and advert.node not in request.only:
        reasons.append("is not to open the job's secrets (--secret-nodes)")
    if request.on and advert.node not in request.on:
        reasons.append("is not one of the job's nodes (--on)")
    if advert.node in request.not_on:
        reasons.append("is not to run the job (--not-on)")
    if request.interactive and not advert.interactive:
        reasons.append("its owner allows no interactive sessions (interactive = false)")
    if request.zone is not None and advert.zone != request.zone:
        reasons.append(f"is in zone {advert.zone or 'none'}, not {request.zone}")
    if request.memory_mib is not None and advert.memory_mib < request.memory_mib:
        reasons.append(
            f"lends at most {advert.memory_mib} MiB of memory to a job, and it asks for {request.memory_mib}"
        )
    if request.cpus is not None and advert.cpus < request.cpus:
        reasons.append(f"lends at most {advert.cpus} CPUs to a job, and it asks for {request.cpus}")
    for wanted in request.data:
        if not wanted.id and wanted.name not in advert.data_paths:
            reasons.append(f"does not offer data set {wanted.name} ([data] in its config.toml)")
    if request.uv and not advert.uv:
        reasons.append("has no uv for the job's environment (its owner can run `pip install uv`)")
    if request.conda and not advert.conda:
        reasons.append("has no py-rattler for the job's environment (its owner can run `pip install py-rattler`)")
    reasons += _network_refusals(request, advert)
    reasons += _gpu_refusals(request, advert) if request.gpus else _slot_refusals(advert)
    if request.job and advert.node in request.exclude:
        reasons.append(FAILED_HERE)
    return reasons


def is_own(request: Request, advert: Advert) -> bool:
    """Tell whether the job and the node belong to one user: the key decides, and the name goes with it."""
    return (request.user_key, request.user) == (advert.user_key, advert.user)


def engine_for(request: Request, advert: Advert) -> str | None:
    """Return the engine this node would use: the requested one, else docker or apptainer for an image,
    else process. None if it has none."""
    usable = [name for name in advert.engines if name not in advert.own_only or is_own(request, advert)]
    if request.engine is not None:
        return request.engine if request.engine in usable else None
    if request.image is not None:
        return next((name for name in IMAGE_ENGINES if name in usable), None)
    return "process" if "process" in usable else None


def _wanted_engine(request: Request, advert: Advert) -> str:
    """Return the engine to name in a refusal: for an image, one that the node has for its owner's jobs."""
    if request.engine is not None or request.image is None:
        return request.engine or "process"
    return next((name for name in IMAGE_ENGINES if name in advert.engines), "docker")


def _engine_refusals(request: Request, advert: Advert) -> list[str]:
    wanted, engine = _wanted_engine(request, advert), engine_for(request, advert)
    if engine is None:
        if wanted in advert.engines:
            weak = (
                "no sandbox): name an image (--image NAME; `mesh image ls`), or"
                if wanted == "process"
                else "weaker than docker):"
            )
            return [f"runs only its owner's jobs with the {wanted} engine ({weak} ask its owner"]
        return [f"has no {wanted} engine"]
    if engine == "process" and request.image is not None:
        return ["its process engine runs no image"]
    if engine in IMAGE_ENGINES:
        if request.image is None:
            return [f"the {engine} engine needs an image: --image NAME"]
        system = advert.system.refusal(request.gpus > 0, request.platform) if request.system else None
        return [reason for reason in (image_refusal(request, advert), system) if reason is not None]
    return []


def _network_refusals(request: Request, advert: Advert) -> list[str]:
    refused = [where for where in request.network if where not in advert.network]
    if refused:
        return [f"its owner does not let jobs reach {', '.join(refused)} (network in its config.toml)"]
    engine = engine_for(request, advert)
    if request.network and engine is not None and engine not in advert.proxies:
        return [f"its {engine} engine cannot keep a job to named hosts (docs/explanation/egress.md)"]
    return []


def _gpu_refusals(request: Request, advert: Advert) -> list[str]:
    if len(advert.gpus) < request.gpus:
        return [f"has {len(advert.gpus)} GPUs, {request.gpus} asked"]
    now = len(fitting_gpus(request, advert.gpus, advert.free_portions))
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
    ever = len(fitting_gpus(request, advert.gpus, all_free(advert.gpus)))
    if ever < request.gpus:
        largest = max(gpu.vram_mib for gpu in advert.gpus if matches(request, gpu))
        return [f"its GPUs have up to {largest} MiB, {request.vram_mib} MiB on {request.gpus} asked"]
    if request.is_share:
        wanted = f"{request.gpu_share} % and {request.vram_mib} MiB left"
        return [f"{now} of {ever} fitting GPUs have {wanted}, {request.gpus} asked"]
    return [f"{now} of {ever} fitting GPUs are free, {request.gpus} asked"]


def _kind_refusal(request: Request, advert: Advert) -> str | None:
    """Return why the node's GPUs or their driver are not of the requested kind; None if they are."""
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
    if advert.slots_free > 0:
        return []
    return ["its only job slot is taken" if advert.slots == 1 else f"all {advert.slots} job slots are taken"]


class ImageOffer(msgspec.Struct, frozen=True):
    """The image fields of a node's advert."""

    images: tuple[str, ...] = ()
    image_list: bool = False
    image_ids: tuple[bytes, ...] = ()
    image_fetches: tuple[bytes, ...] = ()
    image_denials: tuple[str, ...] = ()


def image_refusal(request: Request, advert: Advert) -> str | None:
    """Return why this node does not run the requested image; None if it does."""
    name, wanted = request.image, request.image_id
    if wanted is None:
        if name in advert.images:
            return None
        if advert.image_list:
            return f"image {name} is not on the mesh's list, and the node's owner has not allowed it there"
        return f"has no image {name}"
    short = wanted[:SHORT]
    if name in advert.image_denials or short.hex() in advert.image_denials:
        return f"its owner denies image {name} (`mesh image deny`)"
    if short in advert.image_ids or short in advert.image_fetches:
        return None
    missing = f"image {name} ({wanted.hex()[:12]}) is not on this node, and no node that it can fetch from has it"
    of_user = name is not None and name.startswith("@")
    return f"{missing}, or its owner does not run images of that user" if of_user else missing


class DataOffer(msgspec.Struct, frozen=True):
    """The fields of a node's advert about data sets."""

    data_ids: tuple[bytes, ...] = ()
    data_paths: tuple[str, ...] = ()
    fetch_mib_s: int = 0


def missing_mib(request: Request, advert: Advert) -> int:
    """Return the MiB of data sets that the node would have to fetch first."""
    return sum(wanted.mib for wanted in request.data if wanted.id and wanted.id not in advert.data_ids)


def lacks_image(request: Request, advert: Advert) -> bool:
    """Return True if the node would have to fetch the image first."""
    return request.image_id is not None and request.image_id[:SHORT] not in advert.image_ids
