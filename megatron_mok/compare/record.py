"""What a training run did, one JSON line at a time and one file per rank.

Events (key `event`): `start` (weight hashes before the first step, model FLOPs of a step, device
and versions), `step` (`step` from 1, `seconds`, `moe_seconds` of them in MoE layers, `losses` as
float64, `grad_norm`, `tokens` = hash of the token ids since the step before), `evaluation`
(`losses`), `end` (weight hashes after the last step, peak memory), `error`, `done`. All have
`time`, in seconds since the epoch.
"""

import hashlib
import json
import resource
import sys
import time
import traceback
from pathlib import Path


class Recorder:
    """Writes the events of one rank; a context manager.

    Args:
        folder: where `rank<rank>.jsonl` goes; made if it is not there.
        rank: this process's global rank.
    """

    def __init__(self, folder: Path, rank: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = record_path(folder, rank).open("w", buffering=1)
        self._token_hash = hashlib.sha256()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._file.close()

    def _write(self, event: str, **fields) -> None:
        self._file.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")

    def error(self, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        self._write("error", type=type(error).__name__, message=str(error), traceback=trace)

    def done(self) -> None:
        self._write("done")

    def batch(self, batch) -> None:
        """Add a micro-batch on the host to the step's hash of token ids."""
        self._token_hash.update(batch["tokens"].numpy())
        self._token_hash.update(batch["labels"].numpy())

    def attach(self, training, before_training=None) -> None:
        """Wrap `train`, `train_step` and `evaluate` of `megatron.training.training`.

        Args:
            before_training: called with the model chunks and the optimizer when the weights are
                loaded, before anything is recorded; or None.
        """
        import torch

        from megatron_mok.megatron.replicas import assert_replicas_equal

        from .moe_timer import MoETimer

        on_gpu = torch.cuda.current_device() != torch.device("cpu")  # CPU mode says "cpu"
        moe_timer = None
        original_train, original_step = training.train, training.train_step
        original_evaluate = training.evaluate

        def train(forward_step, model, optimizer, *args, **kwargs):
            nonlocal moe_timer
            if before_training is not None:
                before_training(model, optimizer)
            moe_timer = MoETimer(model, on_gpu)
            weights = assert_replicas_equal(model, "before step 1")
            self._write("start", weights=weights, flops=_flops_per_step(training), **_environment())
            self._token_hash = hashlib.sha256()
            result = original_train(forward_step, model, optimizer, *args, **kwargs)
            weights = assert_replicas_equal(model, "after the last step")
            self._write("end", weights=weights, peak_bytes=_peak_bytes())
            return result

        def train_step(*args, **kwargs):
            moe_timer.take()  # what an evaluation left
            start = time.perf_counter()
            result = original_step(*args, **kwargs)
            losses = {key: float(value) for key, value in result[0].items()}  # waits for the device
            seconds = time.perf_counter() - start
            grad_norm = result[5]
            self._write(
                "step",
                step=kwargs["iteration"] + 1,
                seconds=seconds,
                moe_seconds=moe_timer.take(),
                losses=losses,
                grad_norm=None if grad_norm is None else float(grad_norm),
                tokens=self._token_hash.hexdigest(),
            )
            self._token_hash = hashlib.sha256()
            return result

        def evaluate(*args, **kwargs):
            result = original_evaluate(*args, **kwargs)
            losses = {key: float(value) for key, value in (result[0] or {}).items()}
            self._write("evaluation", losses=losses)
            return result

        training.train, training.train_step = train, train_step
        training.evaluate = evaluate


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def _flops_per_step(training) -> float:
    args = training.get_args()
    return float(training.num_floating_point_operations(args, args.global_batch_size))


def _environment() -> dict:
    import torch

    from megatron_mok.results import installed_versions

    return {"device": torch.cuda.get_device_name(), **installed_versions()}


def _peak_bytes() -> int:
    """Peak device memory of this rank; on CPU ranks the process's peak resident memory."""
    import torch

    peak = torch.cuda.max_memory_allocated()
    if peak:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
