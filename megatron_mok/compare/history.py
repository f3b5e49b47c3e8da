"""What the ranks of one arm recorded, read back and put together."""

import json
from dataclasses import dataclass
from pathlib import Path

from .record import record_path


@dataclass(frozen=True)
class Step:
    """One optimizer step of an arm.

    Attributes:
        seconds: of the slowest rank.
        moe_share: fraction of the step's time in MoE layers, mean of the ranks.
        loss: Megatron's "lm loss", reduced over the global batch; float64 of its float32.
        losses: all that Megatron reduced, by name.
        tokens: hash of the token ids, one per rank.
    """

    seconds: float
    moe_share: float
    loss: float
    losses: dict[str, float]
    grad_norm: float | None
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class History:
    """One arm's run.

    Attributes:
        start: each rank's `start` event (weights by name, flops, device, versions).
        steps: the steps that all ranks finished.
        evaluations: losses of each evaluation, in order.
        end: each rank's `end` event; empty when the run did not get there.
        error: the first error event of any rank, or None.
    """

    start: tuple[dict, ...]
    steps: tuple[Step, ...]
    evaluations: tuple[dict[str, float], ...]
    end: tuple[dict, ...]
    error: dict | None

    @property
    def peak_bytes(self) -> int | None:
        """Largest peak memory of any rank, in bytes."""
        return max((e["peak_bytes"] for e in self.end), default=None)


class EventTail:
    """Reads the events that one rank's file has gained since the last look."""

    def __init__(self, folder: Path, rank: int):
        self._path = record_path(folder, rank)
        self._offset = 0

    def new_events(self) -> list[dict]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def read_history(folder: Path, ranks: int) -> History:
    """Read the files of `ranks` ranks in `folder`; missing files and half lines are left out."""
    events = [EventTail(folder, rank).new_events() for rank in range(ranks)]

    def of_kind(kind):
        return [[e for e in rank_events if e["event"] == kind] for rank_events in events]

    errors = sorted((e for rank in of_kind("error") for e in rank), key=lambda e: e["time"])
    return History(
        start=tuple(e for rank in of_kind("start") for e in rank[:1]),
        steps=tuple(_merge(step) for step in zip(*of_kind("step"), strict=False)),
        evaluations=tuple(_losses(ranks) for ranks in zip(*of_kind("evaluation"), strict=False)),
        end=tuple(e for rank in of_kind("end") for e in rank[:1]),
        error=errors[0] if errors else None,
    )


def _merge(ranks: tuple[dict, ...]) -> Step:
    losses = _losses(ranks)
    return Step(
        seconds=max(r["seconds"] for r in ranks),
        moe_share=sum(r["moe_seconds"] / r["seconds"] for r in ranks) / len(ranks),
        loss=losses.get("lm loss", float("nan")),
        losses=losses,
        grad_norm=ranks[0]["grad_norm"],
        tokens=tuple(r["tokens"] for r in ranks),
    )


def _losses(ranks: tuple[dict, ...]) -> dict[str, float]:
    # Only the last pipeline stage has losses; they are the same on all of its ranks.
    return next((r["losses"] for r in ranks if r["losses"]), {})
