#!/usr/bin/env bash
# Pre-trains DeepSeek-V3 (671 billion parameters) with Megatron-LM.
#
#   MEGATRON_LM=/path/to/Megatron-LM examples/pretrain_deepseek_v3.sh --dry-run
#   NVL72=1 ...                            on GB200 or GB300 NVL72
#   MODEL=configs/deepseek_v3_8gpu.yaml NODES=1 PP=1 GLOBAL_BATCH=64 ...   a proxy on one host
#
# --help lists all variables. Hyperparameters of the model: megatron_mok/models/deepseek_v3.yaml.
# Those of training are from arXiv:2412.19437, section 4.2, but for what is marked as ours.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

default MODEL deepseek_v3
if [[ $NVL72 == 1 ]]; then
  default EP 64
  default PP 4
  default NODES 64
else
  # The paper has EP 64 over 8 hosts. Here an expert-parallel group stays in one NVLink domain.
  default EP 8
  default PP 16
  default NODES 32
fi
# Fewer layers beside the output layer and the multi-token prediction. Ours.
declare -A LAYOUTS=(
  [4]='Et*16|(t*16|)*2t*13mL'
  [8]='Et*8|(t*8|)*6t*5mL'
  [16]='Et*4|(t*4|)*14tmL'
)
default RECOMPUTE "mla_up_proj layernorm" # section 3.2.3; SwiGLU, too, which MoK never keeps
default GLOBAL_BATCH 15360 # after a ramp from 3072 over the first 469B tokens
default TRAIN_ITERS 227300 # 14.3T tokens

TRAIN_ARGS=(
  --lr 2.2e-4 --min-lr 2.2e-5
  --lr-warmup-iters 2000
  # Constant for 10T tokens, then a cosine over 4.3T.
  --lr-decay-style WSD --lr-wsd-decay-style cosine
  --lr-decay-iters 227300 --lr-wsd-decay-iters 68350
  --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
  # Section 3.3.3: moments in BF16, master weights and gradients in FP32.
  --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
)

launch "$@"
