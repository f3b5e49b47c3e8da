"""One torchrun rank of `compare`: runs Megatron's training loop and records what it does.

Started by the runner as `python -m torch.distributed.run ... -m megatron_mok.compare.worker
JOB.json`. The job file is a `Job` as JSON.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

from megatron_mok.megatron import shared_gpu
from megatron_mok.megatron.shared_gpu import SharedGPU

from .record import Recorder


@dataclasses.dataclass(frozen=True)
class Job:
    """What one torchrun launch does.

    Attributes:
        device: "cpu" or "cuda".
        plugin: whether to install megatron_mok's hooks before Megatron parses its arguments.
        megatron_args: Megatron's command line.
        record_dir: where `rank<r>.jsonl` is written.
        runner_pid: the process that waits for the result; without it there is no use in going on.
        save_step0: folder to save the initial weights to, instead of training; or None.
        move_experts: whether to move all expert weights by one ulp before the first step.
        shared_gpu: how ranks share GPUs, or None when each has its own.
    """

    device: str
    plugin: bool
    megatron_args: tuple[str, ...]
    record_dir: str
    runner_pid: int
    save_step0: str | None = None
    move_experts: bool = False
    shared_gpu: SharedGPU | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Job":
        fields = json.loads(path.read_text())
        shared = fields.pop("shared_gpu")
        return cls(
            **{**fields, "megatron_args": tuple(fields["megatron_args"])},
            shared_gpu=None if shared is None else SharedGPU(**shared),
        )


def main(argv: list[str]) -> None:
    job = Job.read(Path(argv[0]))
    _exit_without(os.getppid(), job.runner_pid)
    with Recorder(Path(job.record_dir), int(os.environ["RANK"])) as recorder:
        try:
            run(job, recorder)
        except BaseException as error:  # Megatron's CheckpointException is no Exception
            if not isinstance(error, SystemExit | KeyboardInterrupt):
                recorder.error(error)
            raise


def run(job: Job, recorder: Recorder) -> None:
    """Run `job` in this process, which must be one rank of a torchrun launch."""
    if job.shared_gpu is not None:
        shared_gpu.enable(job.shared_gpu)
    if job.device == "cpu":
        from megatron_mok.megatron import cpu_mode

        cpu_mode.enable()
    elif "--transformer-impl=local" in job.megatron_args:
        from megatron_mok.megatron.local_modules import use_sdpa_attention

        use_sdpa_attention()
    if job.plugin:
        from megatron_mok.megatron import install

        install()

    import megatron.training.training as training
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_mok.megatron.dataset_helpers import use_built_helpers

    from .gpt import GPTTask
    from .yardstick import move_by_one_ulp

    use_built_helpers()
    sys.argv = ["megatron", *job.megatron_args]
    args = parse_and_validate_args()
    if job.save_step0 is None:
        recorder.attach(training, move_by_one_ulp if job.move_experts else None)
    else:
        training.train = _save_instead_of_training
    task = GPTTask(on_batch=recorder.batch)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        task.datasets,
        ModelType.encoder_or_decoder,
        task.forward_step,
        get_embedding_ranks=task.embedding_ranks,
    )
    recorder.done()


def _save_instead_of_training(forward_step, model, optimizer, scheduler, *args, **kwargs):
    from megatron.training.checkpointing import save_checkpoint

    save_checkpoint(0, model, optimizer, scheduler, num_floating_point_operations_so_far=0)
    return 0, 0


def _exit_without(torchrun_pid: int, runner_pid: int) -> None:
    """End this process soon after torchrun or the runner was killed and could not end it."""

    def watch():
        while os.getppid() == torchrun_pid and _exists(runner_pid):
            time.sleep(2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
