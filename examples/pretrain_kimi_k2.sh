#!/usr/bin/env bash
# Pre-trains Kimi K2 (1 trillion parameters) with Megatron-LM.
#
#   MEGATRON_LM=/path/to/Megatron-LM examples/pretrain_kimi_k2.sh --dry-run
#   NVL72=1 ...                            on GB200 or GB300 NVL72
#   MODEL=configs/kimi_k2_8gpu.yaml NODES=1 PP=1 GLOBAL_BATCH=64 ...       a proxy on one host
#
# --help lists all variables. Hyperparameters of the model: megatron_mok/models/kimi_k2.yaml.
# Those of training are from arXiv:2507.20534, section 2.5, but for what is marked as ours. The
# paper's optimizer is MuonClip; this is Adam with the same learning rate.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

default MODEL kimi_k2
if [[ $NVL72 == 1 ]]; then
  default EP 64
  default PP 4
  default NODES 64
else
  default EP 8
  default PP 16
  default NODES 64
fi
# Fewer layers beside the output layer. Ours.
declare -A LAYOUTS=(
  [4]='Et*16|(t*16|)*2t*13L'
  [8]='Et*8|(t*8|)*6t*5L'
  [16]='Et*4|(t*4|)*14tL'
)
default RECOMPUTE "mla_up_proj layernorm" # section 2.4; SwiGLU, too, which MoK never keeps
default GLOBAL_BATCH 16384 # 67M tokens
default TRAIN_ITERS 231000 # 15.5T tokens

TRAIN_ARGS=(
  --lr 2e-4 --min-lr 2e-5
  --lr-warmup-iters 500
  # Constant for 10T tokens, then a cosine over 5.5T.
  --lr-decay-style WSD --lr-wsd-decay-style cosine
  --lr-decay-iters 231000 --lr-wsd-decay-iters 82000
  --weight-decay 0.1
  --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 # ours
)

launch "$@"
