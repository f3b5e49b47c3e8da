#!/usr/bin/env bash
# Pre-trains Qwen3-30B-A3B or Qwen3-235B-A22B with Megatron-LM.
#
#   MEGATRON_LM=/path/to/Megatron-LM examples/pretrain_qwen3_moe.sh --dry-run
#   MODEL=qwen3_235b ...
#   NVL72=1 ...                            on GB200 or GB300 NVL72
#   MODEL=configs/qwen3_30b_8gpu.yaml NODES=1 GLOBAL_BATCH=64 ...          a proxy on one host
#
# --help lists all variables. Hyperparameters of the models: megatron_mok/models/qwen3_*.yaml.
# Those of training are ours: arXiv:2505.09388 gives none of them but the sequence length and the
# number of tokens.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

default MODEL qwen3_30b
declare -A LAYOUTS=()
if [[ $MODEL == qwen3_235b ]]; then
  # A layer less beside the embedding and beside the output layer.
  LAYOUTS=(
    [4]='Et*23|(t*24|)*2t*23L'
    [8]='Et*11|(t*12|)*6t*11L'
  )
  large=1
else
  large=0
fi
if [[ $NVL72 == 1 ]]; then
  default EP 32
  default PP $((large ? 4 : 1))
  default NODES $((large ? 32 : 8))
else
  default EP 8
  default PP $((large ? 8 : 1))
  default NODES $((large ? 32 : 2))
fi
default RECOMPUTE layernorm
default GLOBAL_BATCH 2048
default TRAIN_ITERS 3576000 # the 30T tokens of the general stage

TRAIN_ARGS=(
  --lr 2e-4 --min-lr 2e-5
  --lr-decay-style cosine --lr-decay-iters 3576000
  --lr-warmup-iters 2000
  --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
)

launch "$@"
