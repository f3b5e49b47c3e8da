#!/usr/bin/env bash
# Pre-trains GLM-4.5 (355 billion parameters) or GLM-4.5-Air (106 billion) with Megatron-LM.
#
#   MEGATRON_LM=/path/to/Megatron-LM examples/pretrain_glm4_5.sh --dry-run
#   MODEL=glm_4_5_air ...
#   NVL72=1 ...                            on GB200 or GB300 NVL72
#   MODEL=configs/glm_4_5_air_8gpu.yaml NODES=1 PP=1 GLOBAL_BATCH=64 ...   a proxy on one host
#
# --help lists all variables. Hyperparameters of the models: megatron_mok/models/glm_4_5*.yaml.
# Those of training are from arXiv:2508.06471, section 2.4, but for what is marked as ours. The
# paper's optimizer is Muon; this is Adam with the same learning rate.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

default MODEL glm_4_5
if [[ $MODEL == glm_4_5_air ]]; then
  # Fewer layers beside the output layer and the multi-token prediction. Ours.
  declare -A LAYOUTS=(
    [2]='Et*24|t*22mL'
    [4]='Et*12|(t*12|)*2t*10mL'
  )
  air=1
else
  declare -A LAYOUTS=(
    [4]='Et*24|(t*24|)*2t*20mL'
    [8]='Et*12|(t*12|)*6t*8mL'
  )
  air=0
fi
if [[ $NVL72 == 1 ]]; then
  default EP 32
  default PP $((air ? 2 : 4))
  default NODES $((air ? 16 : 32))
else
  default EP 8
  default PP $((air ? 4 : 8))
  default NODES $((air ? 8 : 32))
fi
default RECOMPUTE layernorm # ours
default GLOBAL_BATCH 16384 # 64M tokens, after a ramp from 16M over the first 500B tokens
default TRAIN_ITERS 343000 # 23T tokens

TRAIN_ARGS=(
  --lr 2.5e-4 --min-lr 2.5e-5
  --lr-decay-style cosine --lr-decay-iters 343000
  --lr-warmup-iters 2000 # ours
  --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 # ours
)

launch "$@"
