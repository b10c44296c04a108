"""Sequence to sequence without alignment, as in speech recognition: a recurrent network with CTC over frames of
features.

The features look like a speech front end's: each of 8 phones has a spectrum of its own, lasts 2 to 5 frames of 20
bands, and is spoken louder or softer under noise. The network hears the frames and writes the phones; nobody tells it
which frame belongs to which.
"""

from __future__ import annotations

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

PHONES, BANDS, LONGEST, FRAMES = 8, 20, 6, 30
SPECTRA = 1.5 * torch.randn(PHONES, BANDS, generator=torch.Generator().manual_seed(7))


def utterances(seed: int, step: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(frames fp32 [count, FRAMES, BANDS], frame counts [count], phones 1..8 int64 [count, LONGEST], phone counts
    [count])."""
    g = draw(seed, step)
    lengths = torch.randint(3, LONGEST + 1, (count,), generator=g)
    phones = torch.randint(1, PHONES + 1, (count, LONGEST), generator=g)
    lasts = torch.randint(2, 6, (count, LONGEST), generator=g) * (torch.arange(LONGEST) < lengths[:, None])
    ends = lasts.cumsum(dim=1)
    at = torch.searchsorted(ends, torch.arange(FRAMES).expand(count, -1).contiguous(), right=True).clamp_max(
        LONGEST - 1
    )
    loud = 0.7 + 0.6 * torch.rand(count, 1, 1, generator=g)
    frames = SPECTRA[phones.gather(1, at) - 1] * loud * (torch.arange(FRAMES) < ends[:, -1:])[:, :, None]
    return frames + 0.5 * torch.randn(frames.shape, generator=g), ends[:, -1], phones, lengths


class Listener(nn.Module):
    """[n, frames, BANDS] -> log-probabilities [frames, n, PHONES + 1]; 0 is the blank."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.ears = nn.Conv1d(BANDS, width, 3, padding=1)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, PHONES + 1)

    def forward(self, frames: Tensor) -> Tensor:
        h = torch.relu(self.ears(frames.transpose(1, 2))).transpose(1, 2)
        return self.head(self.rnn(h)[0]).float().log_softmax(dim=-1).transpose(0, 1)


def make(seed: int) -> Listener:
    torch.manual_seed(seed)
    return Listener()


def train_step(engine, frames: Tensor, frame_counts: Tensor, phones: Tensor, counts: Tensor) -> float:
    said = engine(frames.to(next(engine.parameters()).dtype))
    loss = F.ctc_loss(said, phones, frame_counts, counts)
    engine.backward(loss)
    engine.step()
    return loss.item()


def _edits(a: list[int], b: list[int]) -> int:
    """Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@torch.no_grad()
def phone_error_rate(model, frames: Tensor, frame_counts: Tensor, phones: Tensor, counts: Tensor) -> float:
    """Edits that the likeliest path's phones need, per phone."""
    best = model(frames.to(next(model.parameters()).dtype)).argmax(dim=-1).T
    wrong = 0
    for path, t, want, n in zip(best, frame_counts.tolist(), phones.tolist(), counts.tolist()):
        heard = [p for p in torch.unique_consecutive(path[:t]).tolist() if p]
        wrong += _edits(heard, want[:n])
    return wrong / int(counts.sum())


def main() -> None:
    args = options(__doc__, steps=150, batch=64)
    engine, *_ = deepc.initialize(
        model=make(args.seed), config=config(args, lr=1e-2, weight_decay=0.0) | {"gradient_clipping": 5.0}
    )
    test = utterances(args.seed, -1, 300)
    first = phone_error_rate(engine, *test)
    for step in range(args.steps):
        loss = mean_over_ranks(train_step(engine, *mine(*utterances(args.seed, step, args.batch))))
        if step % 50 == 0:
            say(f"step {step}: loss {loss:.3f}")
    say(f"phone error rate: {first:.1%} before, {phone_error_rate(engine, *test):.1%} after")


if __name__ == "__main__":
    main()
