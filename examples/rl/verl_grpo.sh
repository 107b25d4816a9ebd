#!/usr/bin/env bash
# GRPO in verl with rollouts of SGLang and this backend. MODEL, TRAIN and TEST are yours; further arguments go to verl.
set -euo pipefail
exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${TRAIN:?a parquet file}" \
    data.val_files="${TEST:?a parquet file}" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    +actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=flashsample \
    trainer.n_gpus_per_node=8 \
    "$@"
