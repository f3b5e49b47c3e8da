"""Two ranks that compare replicas of equal and unequal models; each prints what it found."""

import sys

import torch
import torch.multiprocessing as mp

from megatron_mok.megatron import cpu_mode


def make_model():
    model = torch.nn.ModuleDict(
        {name: torch.nn.Linear(2, 2, bias=False) for name in ("dense", "expert")}
    )
    for param in model.parameters():
        torch.nn.init.ones_(param)
    model["expert"].weight.allreduce = False  # Megatron's mark of an expert parameter
    return model


def check(case: str, model) -> None:
    from megatron_mok.megatron.replicas import assert_replicas_equal

    try:
        assert_replicas_equal([model], "now")
        print(f"{case}: equal", flush=True)
    except RuntimeError as error:
        print(f"{case}: {error}", flush=True)


def rank_main(rank: int, store: str) -> None:
    cpu_mode.enable()
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=1)
    check("none", make_model())
    for wrong in ("dense", "expert"):
        model = make_model()
        if rank == 1:
            model[wrong].weight.data.view(torch.int32)[1, 1] += 1  # the last bit of one number
        check(wrong, model)

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = make_model()
    model["expert"].weight.data.fill_(rank)
    check("other experts", model)


if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), nprocs=2)
