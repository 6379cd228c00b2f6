"""Snapshot a small GPT while its training changes the state in place. Prints the results as a line of JSON."""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a fixed order of additions, so a reproducible result

import torch
from torch import nn

from mesh import job


class Model(nn.Module):
    """A small GPT with tied weights, a buffer and an embedding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.middle(self.words(tokens)))


def step(model, optimizer):
    tokens = torch.randint(0, 50, (8,))
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}


def flat(value):
    """Return all numbers of a state as bytes."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    if isinstance(value, dict):
        return b"".join(str(key).encode() + flat(each) for key, each in value.items())
    return b"".join(map(flat, value)) if isinstance(value, list | tuple) else repr(value).encode()


def exact():
    """Check that each snapshot is the state of its step, though training continues before any of it is written."""
    torch.manual_seed(3)
    model, found = Model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with job.Checkpoint("exact") as checkpoint:
        for number in range(1, 5):
            step(model, optimizer)
            may, expected = threading.Event(), flat(state_of(model, optimizer))

            def write(path, state, may=may):
                may.wait()
                job._dump(path, state)

            checkpoint.snapshot(number, state_of(model, optimizer), write)
            step(model, optimizer)
            changed = flat(state_of(model, optimizer)) != expected
            may.set()
            checkpoint.finish()
            loaded = torch.load(checkpoint.latest() / "state.pt")
            tied = loaded["model"]["head.weight"].data_ptr() == loaded["model"]["words.weight"].data_ptr()
            found.append([changed, flat(loaded) == expected, tied, hasattr(loaded["model"], "_metadata")])
    return found


def size():
    """Compare file sizes with torch.save, for tied weights and for views of one tensor."""
    base = torch.arange(1 << 20, dtype=torch.float32)
    state = {"whole": base, "rows": base.view(1024, 1024)[3:9], "turned": base.view(1024, 1024).T, "every": base[::7]}
    with job.Checkpoint("size") as checkpoint:
        checkpoint.snapshot(1, state)
    torch.save(state, "theirs.pt")
    loaded = torch.load(checkpoint.latest() / "state.pt")
    same = all(
        torch.equal(loaded[name], state[name]) and loaded[name].stride() == state[name].stride() for name in state
    )
    return [same, abs((checkpoint.latest() / "state.pt").stat().st_size - Path("theirs.pt").stat().st_size) < 4096]


def kinds():
    """Check other values of a state: each is restored as torch itself restores it."""
    layer = nn.Linear(3, 3)
    odd = nn.Parameter(torch.ones(2))
    odd.note = "an attribute"
    state = {
        "parameter": layer.weight,
        "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
        "wants a gradient": torch.ones(3, requires_grad=True),
        "of a graph": layer(torch.ones(3)),
        "sparse": torch.eye(4).to_sparse(),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "with an attribute": odd,
        "module": layer,
        "list": [(torch.ones(1),), 3],
    }
    with job.Checkpoint("kinds") as checkpoint:
        checkpoint.snapshot(1, state)
    found = torch.load(checkpoint.latest() / "state.pt", weights_only=False)
    wrong = [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and not (
            type(found[name]) is type(value)
            and found[name].dtype == value.dtype
            and found[name].shape == value.shape
            and found[name].requires_grad == (value.requires_grad and value.is_leaf)
            and torch.equal(found[name].detach().to_dense(), value.detach().to_dense())
        )
    ]
    return [wrong, found["list"][0][0].item(), found["module"].weight.equal(layer.weight)]


def resumed():
    """Compare the weights of a training in two parts with those of an uninterrupted one."""

    def train(steps, checkpoint, every):
        torch.manual_seed(5)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        begin = 0
        if checkpoint.latest():
            state = torch.load(checkpoint.latest() / "state.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            begin = state["step"]
        for number in range(begin + 1, steps + 1):
            step(model, optimizer)
            if number % every == 0:
                checkpoint.snapshot(number, {"step": number, **state_of(model, optimizer)}, wait=True)
        checkpoint.finish()
        return flat(model.state_dict())

    train(11, job.Checkpoint("cut"), 4)
    return [
        sorted(path.name for path in Path("cut").iterdir()),
        train(30, job.Checkpoint("cut"), 4) == train(30, job.Checkpoint("whole"), 50),
    ]


os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
print(json.dumps({"what": "snapshots", **{made.__name__: made() for made in (exact, size, kinds, resumed)}}))
