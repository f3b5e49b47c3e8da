# shellcheck shell=bash
# What the launch scripts share. A script sets MODEL and its defaults with `default`, the array
# TRAIN_ARGS and the pipeline layouts, and ends in `launch "$@"`.

usage() {
  cat <<EOF
usage: [VARIABLE=value ...] $0 [--dry-run | --print] [MEGATRON_FLAG ...]

Run it on every node. Flags given here come last, so they win over the script's.

  --dry-run   check everything and print parameters, memory and layout; needs no GPU
  --print     print the command in place of running it

variables (with their values now):
  DISPATCHER     $DISPATCHER: mok, alltoall, allgather, deepep, hybridep or ncclep
  MODEL          $MODEL: a name that \`megatron-mok flags --help\` lists, or a file of configs/
  NVL72          $NVL72: 1 for one NVLink domain of 72 GPUs in hosts of 4
  NODES          $NODES
  GPUS_PER_NODE  $GPUS_PER_NODE
  TP PP EP CP    $TP $PP $EP $CP: tensor, pipeline, expert and context parallel sizes
  LAYOUT         ${LAYOUT:-none}: --pipeline-model-parallel-layout
  MICRO_BATCH    $MICRO_BATCH
  GLOBAL_BATCH   $GLOBAL_BATCH
  TRAIN_ITERS    $TRAIN_ITERS
  RECOMPUTE      $RECOMPUTE: none, full, or modules of --recompute-modules
  MEGATRON_LM    ${MEGATRON_LM:-not set}: checkout of Megatron-LM, for its pretrain_gpt.py
  DATA_PATH      ${DATA_PATH:-mock data}: --data-path, prefixes and weights
  TOKENIZER      ${TOKENIZER:-none, with mock data}: name or folder of a Hugging Face tokenizer
  CHECKPOINTS    ${CHECKPOINTS:-not saved}: folder to save to and to load from
  NODE_RANK      $NODE_RANK
  MASTER_ADDR    $MASTER_ADDR
  MASTER_PORT    $MASTER_PORT
  PYTHON         $PYTHON
EOF
}

fail() {
  echo "$0: $*" >&2
  exit 2
}

# default NAME VALUE: the value of a variable that the caller has not set.
default() {
  if [[ -z ${!1+set} ]]; then
    printf -v "$1" '%s' "$2"
  fi
}

default NVL72 0
default CP 1
default TP 1
default MICRO_BATCH 1
default PYTHON python3
default NODE_RANK "${SLURM_NODEID:-0}"
default MASTER_ADDR localhost
default MASTER_PORT 29500
if [[ $NVL72 == 1 ]]; then
  # MoK does not span hosts yet.
  default DISPATCHER hybridep
  default GPUS_PER_NODE 4
else
  default DISPATCHER mok
  default GPUS_PER_NODE 8
fi

# The layout for PP from the associative array LAYOUTS, where the caller gave none. Without any
# layouts Megatron gives every stage the same number of layers.
choose_layout() {
  if [[ $PP == 1 || -n ${LAYOUT+set} || ${#LAYOUTS[@]} == 0 ]]; then
    return
  fi
  LAYOUT=${LAYOUTS[$PP]-}
  [[ -n $LAYOUT ]] ||
    fail "no pipeline layout for PP=$PP: there are layouts for ${!LAYOUTS[*]}; set LAYOUT" \
      "(E embedding, t layer, m MTP, L loss, | between stages, *n repeats)"
}

launch() {
  local mode=run
  case ${1-} in
    --dry-run) mode=dry ;;
    --print) mode=print ;;
    -h | --help)
      usage
      exit 0
      ;;
  esac
  if [[ $mode != run ]]; then
    shift
  fi
  choose_layout

  local model_flags
  model_flags=$("$PYTHON" -m megatron_mok flags "$MODEL" --arm "$DISPATCHER" --tp "$TP") || exit 2
  mapfile -t MODEL_ARGS <<<"$model_flags"

  PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP"
    --expert-tensor-parallel-size 1 # MoK's experts are whole
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
  )
  if [[ $TP != 1 ]]; then
    PARALLEL_ARGS+=(--sequence-parallel)
  fi
  if [[ $PP != 1 && -n ${LAYOUT-} ]]; then
    PARALLEL_ARGS+=(--pipeline-model-parallel-layout "$LAYOUT")
  fi

  SPEED_ARGS=(
    --bf16
    --transformer-impl transformer_engine
    --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native
    --no-create-attention-mask-in-dataloader
    --manual-gc
    --manual-gc-interval 100
  )
  if [[ $DISPATCHER != mok* ]]; then
    SPEED_ARGS+=(--moe-permute-fusion)
  fi
  case $RECOMPUTE in
    none) ;;
    full) SPEED_ARGS+=(--recompute-granularity full --recompute-method uniform
      --recompute-num-layers 1) ;;
    *)
      # shellcheck disable=SC2206  # one word for each module
      SPEED_ARGS+=(--recompute-granularity selective --recompute-modules $RECOMPUTE)
      ;;
  esac

  DATA_ARGS=()
  if [[ -n ${DATA_PATH-} ]]; then
    [[ -n ${TOKENIZER-} ]] || fail "DATA_PATH is set, so TOKENIZER must be too"
    # shellcheck disable=SC2206  # prefixes and weights are words
    DATA_ARGS+=(--data-path $DATA_PATH --split "99,1,0")
    DATA_ARGS+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
  else
    DATA_ARGS+=(--mock-data --tokenizer-type NullTokenizer)
  fi

  OUTPUT_ARGS=(--log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000)
  if [[ -n ${CHECKPOINTS-} ]]; then
    OUTPUT_ARGS+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 1000
      --ckpt-format torch_dist)
  fi

  # Megatron wants it for tensor and context parallelism before Blackwell; a dry run takes the GPUs
  # for Hopper.
  if [[ $TP != 1 || $CP != 1 ]] && [[ $NVL72 != 1 || $mode == dry ]]; then
    export CUDA_DEVICE_MAX_CONNECTIONS=1
  fi
  if [[ $DISPATCHER == hybridep ]]; then
    export NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=$EP
    if [[ $NVL72 == 1 ]]; then
      export NVLINK_DOMAIN_SIZE=72 USE_MNNVL=1
    else
      export NVLINK_DOMAIN_SIZE=$GPUS_PER_NODE USE_MNNVL=0
    fi
  fi

  SCRIPT=()
  if [[ -n ${MEGATRON_LM-} ]]; then
    SCRIPT=("$MEGATRON_LM/pretrain_gpt.py")
  elif [[ $mode != dry ]]; then
    fail "MEGATRON_LM is not set: the path of a checkout of Megatron-LM, for its pretrain_gpt.py"
  fi
  MEGATRON_ARGS=(
    "${MODEL_ARGS[@]}"
    "${PARALLEL_ARGS[@]}"
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$TRAIN_ITERS"
    "${TRAIN_ARGS[@]}"
    "${SPEED_ARGS[@]}"
    "${DATA_ARGS[@]}"
    "${OUTPUT_ARGS[@]}"
    "$@"
  )
  if [[ $mode == dry ]]; then
    exec "$PYTHON" -m megatron_mok.megatron.launcher --dry-run="${NODES}x$GPUS_PER_NODE" \
      "${SCRIPT[@]}" "${MEGATRON_ARGS[@]}"
  fi
  COMMAND=(
    "$PYTHON" -m torch.distributed.run
    --nnodes "$NODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT"
    -m megatron_mok.megatron.launcher
    "${SCRIPT[@]}"
    "${MEGATRON_ARGS[@]}"
  )
  if [[ $mode == print ]]; then
    printf '%q ' "${COMMAND[@]}"
    echo
    exit 0
  fi
  exec "${COMMAND[@]}"
}
