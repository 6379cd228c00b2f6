"""Checkpoints to measure the store with, written by torch from real, seeded trainings on the CPU.

    python checkpoints.py DIRECTORY [CASE ...]

Each case becomes DIRECTORY/CASE/1 and DIRECTORY/CASE/2, the same training ten steps apart, 500 MB or more. `full` is a GPT that
trains all weights, with AdamW's state (steps 20 and 30). `froz` is a larger GPT that trains only the last block. `emb` is an
embedding table with 8 % of its rows changed. `lora` has the weights of `froz`, then the same with LoRA tensors in front.
"""

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CONTEXT, BATCH, VOCABULARY = 64, 4, 8192
Tokens = torch.Tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, width // 64, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.before(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(seen, seen, seen, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tokens) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def text() -> Tokens:
    """Return the source of the standard library, in pairs of bytes."""
    data = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    pairs = torch.frombuffer(bytearray(data[: len(data) // 2 * 2]), dtype=torch.int16).long()
    return pairs.remainder(VOCABULARY)


def train(model: Gpt, steps: tuple[int, int], save: Callable[[int, dict[str, object]], None]) -> None:
    """Train, and save at these steps."""
    data, choose = text(), torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    for step in range(1, steps[1] + 1):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=choose)
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step in steps:
            save(
                steps.index(step) + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            )


def full(root: Path) -> None:
    torch.manual_seed(1)
    train(Gpt(640, 7), (20, 30), lambda number, state: write(state, root / str(number) / "model.pt"))


def backbone() -> Gpt:
    torch.manual_seed(2)
    model = Gpt(1024, 10)
    for name, weights in model.named_parameters():
        weights.requires_grad = name.startswith("blocks.9.")
    return model


def froz(root: Path) -> None:
    train(backbone(), (10, 20), lambda number, state: write(state, root / str(number) / "model.pt"))


def emb(root: Path) -> None:
    random = torch.Generator().manual_seed(3)
    table = torch.randn(2_100_000, 64, generator=random)
    write({"table": table}, root / "1" / "model.pt")
    rows = torch.randperm(len(table), generator=random)[: int(0.0805 * len(table))]
    table[rows] += 1e-3 * torch.randn(len(rows), 64, generator=random)
    write({"table": table}, root / "2" / "model.pt")


def lora(root: Path) -> None:
    weights = backbone().state_dict()
    write(weights, root / "1" / "model.pt")
    random = torch.Generator().manual_seed(4)
    added = {f"lora.{n}": torch.randn(8, 1024, generator=random) for n in range(10)}
    write({**added, **weights}, root / "2" / "model.pt")


def write(state: object, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


CASES = {"full": full, "froz": froz, "emb": emb, "lora": lora}


def main() -> None:
    root, *chosen = sys.argv[1:]
    for case in chosen or CASES:
        CASES[case](Path(root) / case)
        sizes = [path.stat().st_size for path in sorted((Path(root) / case).rglob("*.pt"))]
        print(f"{case}: {', '.join(f'{size / 1e6:.0f} MB' for size in sizes)}", flush=True)


if __name__ == "__main__":
    main()
