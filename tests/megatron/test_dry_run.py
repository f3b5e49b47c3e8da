"""`launcher --dry-run`: what it counts, what it refuses and how it says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_mok.models import MODELS, load_model
from megatron_mok.runtime.engine import engine_problem
from tests.megatron.launcher_forks import LauncherForks

FOLDER = Path(__file__).parent
SCRIPT = str(FOLDER / "pretrain_script.py")

TRAIN = [
    *("--bf16", "--use-distributed-optimizer", "--mock-data", "--tokenizer-type=NullTokenizer"),
    *("--micro-batch-size=1", "--global-batch-size=512", "--train-iters=100", "--lr=1e-4"),
]
SMALL = [
    *("--vocab-size=1000", "--num-layers=4", "--hidden-size=64", "--ffn-hidden-size=192"),
    *("--num-attention-heads=4", "--seq-length=32", "--max-position-embeddings=32", "--swiglu"),
    *(
        "--disable-bias-linear",
        "--num-experts=8",
        "--moe-router-topk=2",
        "--moe-ffn-hidden-size=64",
    ),
    *("--moe-router-dtype=fp32", "--normalization=RMSNorm", "--position-embedding-type=rope"),
    "--expert-tensor-parallel-size=1",
]
MOK = "--moe-token-dispatcher-type=mok"
LATENT = [
    *("--multi-latent-attention", "--kv-lora-rank=16", "--qk-head-dim=16"),
    *("--qk-pos-emb-head-dim=8", "--v-head-dim=16"),
]


@pytest.fixture(scope="module")
def forks():
    forks = LauncherForks()
    yield forks
    forks.close()


def model_args(name):
    model = load_model(name)
    return [*model.flags(), f"--vocab-size={model.vocab_size}"]


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        pytest.param(
            16,
            [
                *LATENT,
                *("--q-lora-rank=32", "--moe-layer-freq=([0]*1+[1]*3)", "--mtp-num-layers=1"),
                *("--moe-shared-expert-intermediate-size=64", "--expert-model-parallel-size=4"),
                *("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"),
                *("--untie-embeddings-and-output-weights", "--qk-layernorm"),
            ],
            id="latent attention, TP, PP, EP",
        ),
        pytest.param(
            16,
            [
                *("--group-query-attention", "--num-query-groups=2", "--kv-channels=32"),
                *("--add-qkv-bias", "--qk-layernorm", "--moe-shared-expert-gate"),
                *("--moe-shared-expert-intermediate-size=64", "--expert-model-parallel-size=4"),
                *("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"),
                *("--expert-tensor-parallel-size=2", "--position-embedding-type=learned_absolute"),
                "--normalization=LayerNorm",
            ],
            id="query groups, tied embeddings, ETP",
        ),
        pytest.param(
            8,
            [
                *LATENT,
                *("--pipeline-model-parallel-size=2", "--expert-model-parallel-size=2"),
                *("--pipeline-model-parallel-layout=Et|tt|t|mL", "--mtp-num-layers=1"),
                *("--moe-layer-freq=2", "--untie-embeddings-and-output-weights"),
            ],
            id="layout with virtual stages",
        ),
        pytest.param(
            4,
            [
                *("--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"),
                *("--group-query-attention", "--num-query-groups=1"),
            ],
            id="virtual stages",
        ),
        pytest.param(
            4,
            [
                *("--group-query-attention", "--num-query-groups=1", "--mtp-num-layers=2"),
                *("--tensor-model-parallel-size=2", "--expert-model-parallel-size=2"),
            ],
            id="fewer query groups than TP",
        ),
    ],
)
def test_counts_are_those_of_the_model_that_megatron_builds(ranks, args):
    command = [sys.executable, "-m", "megatron_mok.megatron.launcher", "--cpu"]
    done = subprocess.run(
        [*command, str(FOLDER / "built_models.py"), *SMALL, *TRAIN, *args],
        env=os.environ
        | {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "WORLD_SIZE": str(ranks),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for stage in found["stages"]:
        assert stage["counted"] == stage["built"]
    # What the report says of where groups are.
    for group in found["expert_groups"]:
        assert group == list(range(group[0], group[0] + len(group)))


# Billions, as the models' papers and cards round them.
PUBLISHED = {
    "deepseek_v3": (671, 37),
    "glm_4_5": (355, 32),
    "glm_4_5_air": (106, 12),
    "kimi_k2": (1040, 32),
    "qwen3_235b": (235, 22),
    "qwen3_30b": (30.5, 3.3),
}


@pytest.mark.parametrize("name", MODELS)
def test_known_models_have_as_many_parameters_as_published(name, forks):
    args = [*model_args(name), *TRAIN, MOK, "--expert-tensor-parallel-size=1"]
    status, out, err = forks.run(["--dry-run=1x8", *args, "--expert-model-parallel-size=8"])
    assert status == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("parameters")]
    total, active = (float(word) for word in line.split()[1::3][:2])
    assert total == pytest.approx(PUBLISHED[name][0], rel=0.02)
    assert active == pytest.approx(PUBLISHED[name][1], rel=0.12)


def test_report(forks):
    layout = "--pipeline-model-parallel-layout=Et*8|(t*8|)*6t*5mL"
    args = [*model_args("deepseek_v3"), *TRAIN, MOK, layout, "--expert-tensor-parallel-size=1"]
    sizes = ["--expert-model-parallel-size=8", "--pipeline-model-parallel-size=8"]
    status, out, err = forks.run(["--dry-run=16x8", SCRIPT, *args, *sizes])
    assert (status, err) == (0, "")
    expected = """\
model       61 layers (3 dense, 58 MoE), 1 MTP, hidden 7,168, vocabulary 129,280
parameters  671.03 B total, 37.55 B active per token; MTP 11.61 B
ranks       128: 16 hosts of 8
attention   TP 1 x CP 1 x DP 16 x PP 8
experts     ETP 1 x EP 8 x DP 2 x PP 8; 32 experts on a rank
            each group of 8 consecutive ranks is in one host
step        512 sequences of 4,096 (2,097,152 tokens), 32 microbatches of 1 on a rank
dispatcher  mok: up to 4,096 tokens of a rank in a call; backward keeps 40,960 rows (0.37 GiB with \
the input)
  0       embedding + 3 dense + 5 MoE
  1-6     8 MoE
  7       5 MoE + 1 MTP + output
"""
    for line in expected.splitlines():
        assert line in out.splitlines()
    # 13.14 B parameters: 2 bytes of weights, 4 of gradients; 12 of states over 2 ranks, but over
    # 16 for all that is not an expert; 8 layers with 8 microbatches and then fewer in flight.
    (row,) = [line.split() for line in out.splitlines() if line.startswith("  1-6  ")][1:]
    params, weights, grads, _, workspace, saved, total = (
        float(cell) for cell in row[1:] if cell != "B"
    )
    assert weights == pytest.approx(params * 2e9 / 2**30, rel=1e-3)
    assert grads == pytest.approx(params * 4e9 / 2**30, rel=1e-3)
    assert saved == pytest.approx(7 * 8 * (40960 * 4096 + 4096 * 7168) * 2 / 2**30, rel=1e-3)
    assert total == pytest.approx(sum(float(cell) for cell in row[3:-1]), abs=0.03)
    if engine_problem("cuda"):
        assert workspace == 0
        assert "the size of the workspace is not known here" in out
    else:
        assert workspace > 0.5


def saved_gib(forks, *args):
    """What stage 0 keeps for backward, in rows of the fused layers' input and pre-activations."""
    base = [*model_args("qwen3_30b"), *TRAIN, MOK, "--expert-tensor-parallel-size=1"]
    status, out, err = forks.run(["--dry-run=2x8", *base, "--expert-model-parallel-size=4", *args])
    assert status == 0, err
    row = [line for line in out.splitlines() if line.startswith("  0")][-1].split()
    return float(row[-2])


def test_saved_rows_of_the_schedule(forks):
    a_layer = (40960 * 2 * 768 + 4096 * 2048) * 2 / 2**30
    assert saved_gib(forks) == pytest.approx(48 * a_layer, rel=1e-2)
    pipeline = "--pipeline-model-parallel-size=4"
    assert saved_gib(forks, pipeline) == pytest.approx(4 * 12 * a_layer, rel=1e-2)
    # Rank 0 of 4 runs 2 * 3 + 2 chunks of 6 layers and one more ahead of backward.
    virtual = (pipeline, "--num-layers-per-virtual-pipeline-stage=6")
    assert saved_gib(forks, *virtual) == pytest.approx(11 * 6 * a_layer, rel=1e-2)
    recompute = ("--recompute-granularity=selective", "--recompute-modules", "moe")
    assert saved_gib(forks, pipeline, *recompute) == pytest.approx(a_layer, abs=0.006)
    none = "--mok-saved-rows-factor=0"
    inputs = 48 * 4096 * 2048 * 2 / 2**30
    assert saved_gib(forks, none) == pytest.approx(inputs, rel=1e-2)


def test_gradients_that_cannot_be_added_in_place(forks):
    args = [*model_args("qwen3_30b"), *TRAIN, MOK, "--expert-model-parallel-size=8"]
    status, out, err = forks.run(["--dry-run=2x8", *args])
    assert status == 0, err
    assert "Fresh weight gradients" not in out
    status, out, err = forks.run(["--dry-run=2x8", *args, "--grad-reduce-in-bf16"])
    assert status == 0, err
    gib = 16 * 3 * 2048 * 768 * 4 / 2**30
    assert f"Fresh weight gradients of a layer pass through {gib:.2f} GiB besides" in out


def test_mode_dispatch(forks):
    args = [*model_args("qwen3_30b"), *TRAIN, MOK, "--expert-model-parallel-size=8"]
    status, out, err = forks.run(["--dry-run=2x8", *args, "--mok-mode=dispatch"])
    assert (status, err) == (0, "")
    assert (
        "dispatcher  mok, mode dispatch: up to 4,096 tokens of a rank in a call; Megatron's "
        "experts keep what backward needs\n" in out
    )
    (header,) = [line for line in out.splitlines() if line.split()[:1] == ["stage"]]
    assert header.split()[-2:] == ["workspace", "total"]
    assert "Not counted:\nactivations, temporary buffers" in out
    assert "workspace: MoK's, one for all layers" in out


def test_other_dispatchers(forks):
    flex = ["--moe-token-dispatcher-type=flex", "--moe-flex-dispatcher-backend=hybridep"]
    args = [*SMALL, *TRAIN, *flex, "--expert-model-parallel-size=8"]
    status, out, err = forks.run(["--dry-run=2x4", *args])
    assert status == 0, err
    assert "dispatcher  flex, hybridep\n" in out
    assert "a group of 8 consecutive ranks spans 2 hosts or more" in out
    assert "Not counted:\nactivations, temporary buffers" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--expert-model-parallel-size=3"],
            "--num-experts 8 is not a multiple of --expert-model-parallel-size 3",
        ),
        (
            ["--pipeline-model-parallel-size=3"],
            "16 ranks are not a multiple of the tensor x pipeline x context parallel size "
            "(1 x 3 x 1 = 3)",
        ),
        (
            ["--expert-model-parallel-size=8", "--pipeline-model-parallel-size=4"],
            "16 ranks are not a multiple of the expert tensor x expert x pipeline parallel size "
            "(1 x 8 x 4 = 32)",
        ),
        (
            ["--global-batch-size=24"],
            "--global-batch-size 24 is not a multiple of --micro-batch-size x data-parallel size "
            "(1 x 16)",
        ),
        (
            ["--moe-token-dispatcher-type=flex", "--expert-model-parallel-size=1"],
            "--moe-token-dispatcher-type flex: needs tensor x expert parallel > 1",
        ),
        (["--pipeline-model-parallel-size=8"], "Number of layers should be divisible"),
        (["--hidden-size=63"], "assert args.hidden_size % args.num_attention_heads == 0"),
        (["--mok-saved-rows-factor=-1"], "--mok-saved-rows-factor -1.0: must be"),
        (["--expert-model-parallel-size=16", "--num-experts=16"], "a host has 8 ranks"),
        (["--moe-expert-capacity-factor=1.0"], "drop --moe-expert-capacity-factor"),
        (["--tokenizer-type=HuggingFaceTokenizer", "--vocab-size=0"], "set --vocab-size"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_settings(args, message, forks):
    status, out, err = forks.run(["--dry-run=2x8", SCRIPT, *SMALL, *TRAIN, MOK, *args])
    assert status == 1
    assert out == ""
    assert err.startswith("dry run: ")
    assert message in err


def test_yaml_is_not_known(forks, tmp_path):
    config = tmp_path / "x.yaml"
    # Megatron takes what it needs before its checks from the file too.
    no = ("disable_msc_deprecated", "enable_ft_package", "enable_msc", "use_checkpoint_args")
    text = "".join(f"{key}: false\n" for key in no)
    config.write_text(f"{text}ckpt_convert_format: null\nyaml_cfg: x.yaml\n")
    status, _, err = forks.run(["--dry-run=2x8", SCRIPT, f"--yaml-cfg={config}"])
    assert status == 1
    assert "dry run: --yaml-cfg: the dry run knows Megatron's flags only" in err


def test_wrong_usage(forks):
    status, _, err = forks.run(["--dry-run=8", *SMALL])
    assert status == 2
    assert "--dry-run=8: give hosts and GPUs of a host, such as 16x8" in err
    status, _, err = forks.run(["--dry-run", "nothing.py"])
    assert status == 2
    assert "SCRIPT 'nothing.py' is not a file" in err
    status, _, err = forks.run(["--dry-run", *SMALL, "--moe-token-dispatcher-type=mook"])
    assert status == 2  # argparse's
    assert "invalid choice: 'mook'" in err


def test_a_script_that_would_train_does_not(forks, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch; torch.distributed.init_process_group()")
    status, _, err = forks.run(["--dry-run", str(script)])
    assert status == 1
    assert "starts its process groups before" in err
    script.write_text("print('done')")
    status, _, err = forks.run(["--dry-run", str(script)])
    assert status == 1
    assert "ended before Megatron checked any arguments" in err


def test_on_cpu_ranks():
    command = [sys.executable, "-m", "megatron_mok.megatron.launcher", "--dry-run=1x2", "--cpu"]
    args = [*SMALL, *TRAIN, MOK, "--expert-model-parallel-size=2"]
    args.remove("--bf16")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, SCRIPT, *args], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "GiB on each rank\n" in done.stdout
    assert "GPU" not in done.stdout
    assert "0.5" in next(line for line in done.stdout.splitlines() if line.startswith("parameters"))


def test_ranks_from_the_environment(forks):
    args = ["--dry-run", SCRIPT, *SMALL, *TRAIN, MOK, "--expert-model-parallel-size=4"]
    status, out, err = forks.run(args, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0"})
    assert status == 0, err
    assert "ranks       8: 2 hosts of 4\n" in out
    status, out, err = forks.run(args, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "3"})
    assert (status, out, err) == (0, "", "")


def test_files_that_are_not_here(forks, tmp_path):
    (tmp_path / "there.idx").touch()
    data = ["--data-path", "0.5", str(tmp_path / "there"), "0.5", str(tmp_path / "gone")]
    args = [*SMALL, *TRAIN, MOK, "--expert-model-parallel-size=8", "--tokenizer-model=/no/model"]
    args.remove("--mock-data")
    status, out, err = forks.run(["--dry-run=1x8", *args, *data, "--split=99,1,0"])
    assert status == 0, err
    missing = out.split("Not on this machine:\n")[1]
    assert missing.splitlines() == [
        f"  --data-path: {tmp_path / 'gone'}.idx",
        "  --tokenizer-model: /no/model",
    ]
