"""DeepSpeed files of public repositories, rewritten from their keys, and their expected outcomes.

Each is named by its repository and path. `as_published` is a part of the line that refuses the
file, or None if the file runs; `in_bf16` is the same for the file with bf16 in place of fp16, which
most of them have.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

Section = dict[str, Any]
NO_FP16 = "fp16.enabled=true: fp16 is not supported"
_CPU = {"device": "cpu"}
_PINNED = {"device": "cpu", "pin_memory": True}


def fp16(enabled: Any = True, power: int | None = 16, **more: Any) -> Section:
    """The section of dynamic loss scaling as most files have it, on or off."""
    section: Section = {"enabled": enabled, "loss_scale": 0, "loss_scale_window": 1000}
    section |= {"hysteresis": 2, "min_loss_scale": 1}
    return {**section, **({} if power is None else {"initial_scale_power": power}), **more}


def auto(*names: str) -> Section:
    """Keys with the value "auto", to be filled in from the job."""
    return dict.fromkeys(names, "auto")


SIZES = auto("train_batch_size", "train_micro_batch_size_per_gpu")
STEP = {**SIZES, **auto("gradient_accumulation_steps", "gradient_clipping")}
ADAMW = {"type": "AdamW", "params": auto("lr", "betas", "eps", "weight_decay")}
RATES = auto("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
WARMUP = {"type": "WarmupLR", "params": RATES}
DECAY = {"type": "WarmupDecayLR", "params": {**RATES, "total_num_steps": "auto"}}
BF16 = {"bf16": {"enabled": True}}
EITHER = {"bf16": {"enabled": "auto"}, "fp16": fp16("auto")}
QUIET = {"wall_clock_breakdown": False}


def stage_2(size: float | None = 2e8, *, overlap: bool = True, **more: Any) -> Section:
    """The usual section of ZeRO 2."""
    zero: Section = {"stage": 2, "allgather_partitions": True, "reduce_scatter": True}
    zero |= {"overlap_comm": overlap, "contiguous_gradients": True}
    if size is not None:
        zero |= {"allgather_bucket_size": size, "reduce_bucket_size": size}
    return {**zero, **more}


def stage_3(**more: Any) -> Section:
    """The usual section of ZeRO 3."""
    buckets = auto(
        *("reduce_bucket_size", "stage3_prefetch_bucket_size"),
        "stage3_param_persistence_threshold",
    )
    zero: Section = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, **buckets}
    zero |= {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9}
    zero |= {"stage3_max_reuse_distance": 1e9}
    return {**zero, "stage3_gather_16bit_weights_on_model_save": True, **more}


def adam(**params: Any) -> Section:
    """The optimizer of the example in DeepSpeed's documentation."""
    return {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, **params}}


@dataclass(frozen=True)
class PublicFile:
    """One file and its expected outcome."""

    source: str
    """Repository and path on GitHub."""
    config: Section
    as_published: str | None = None
    in_bf16: str | None = None
    words: tuple[str, ...] = ()
    """Additional words of the job that the file needs."""

    @property
    def with_bf16(self) -> Section:
        """The same file with bf16 in place of fp16."""
        config = copy.deepcopy(self.config)
        config.pop("fp16", None)
        return {**config, **BF16}


FILES: dict[str, PublicFile] = {
    "transformers, zero 2": PublicFile(
        "huggingface/transformers tests/deepspeed/ds_config_zero2.json",
        {
            **{**EITHER, **STEP, **QUIET, "optimizer": ADAMW, "scheduler": WARMUP},
            **{"zero_optimization": stage_2(offload_optimizer=_PINNED), "steps_per_print": 2000},
        },
    ),
    "transformers, zero 3": PublicFile(
        "huggingface/transformers tests/deepspeed/ds_config_zero3.json",
        {
            **{**QUIET, "fp16": fp16(), "steps_per_print": 2000},
            "zero_optimization": {
                **{"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
                **{"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e14},
                **{"reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0},
                **{"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1e9},
                **{"stage3_max_reuse_distance": 1e9},
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500},
            },
        },
        NO_FP16,
        "DeepSpeed refuses it: .*reduce_bucket_size",
    ),
    "LLaMA-Factory, zero 0": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z0_config.json",
        {
            **{**EITHER, **STEP, "zero_allow_untested_optimizer": True},
            "zero_optimization": {
                **stage_2(5e8, overlap=False, round_robin_gradients=True),
                "stage": 0,
            },
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        },
        "zero_optimization.stage=0 shards nothing. Use --strategy ddp",
    ),
    "LLaMA-Factory, zero 2": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_config.json",
        {
            **{**EITHER, **STEP, "zero_allow_untested_optimizer": True},
            "zero_optimization": stage_2(5e8, overlap=False, round_robin_gradients=True),
            "comms_config": {"verbose": False},
            "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        },
    ),
    "LLaMA-Factory, AutoTP": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_autotp_config.json",
        {
            **{**EITHER, **STEP, "_comment": "models", "zero_allow_untested_optimizer": True},
            "zero_optimization": stage_2(5e8, overlap=False, round_robin_gradients=True),
            "tensor_parallel": {"autotp_size": 2},
        },
        "tensor_parallel is not supported. Use --strategy tensor mesh.tp=N",
    ),
    "LLaMA-Factory, fp8": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_fp8_config.json",
        {
            **auto("train_micro_batch_size_per_gpu"),
            **{"gradient_clipping": 0.001, "zero_allow_untested_optimizer": True},
            **{"zero_force_ds_cpu_optimizer": True, "fp16": fp16(enabled=False)},
            **{"bf16": {"enabled": False}, "fp8": {"enabled": True, "hysteresis": 2}},
            "zero_optimization": stage_3(
                overlap_comm=False,
                offload_optimizer={"device": "cpu", "pin_memory": False},
                reduce_bucket_size=12845056,
                stage3_prefetch_bucket_size=11560550,
                stage3_param_persistence_threshold=35840,
            ),
            "steps_per_print": 10000000,
        },
        "fp8 is not supported. Use train.precision=bf16",
    ),
    "LLaMA-Factory, Ulysses": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_alst_config.json",
        {
            **{**STEP, **QUIET, "optimizer": ADAMW, "scheduler": WARMUP},
            "zero_optimization": stage_3(offload_optimizer=_PINNED, offload_param=_PINNED),
            "sequence_parallel": {"enabled": True, "size": 4, "mode": "ulysses"},
            "bf16": {"enabled": True, "auto_cast": False, "loss_scale": 0},
            "steps_per_print": 10,
        },
        "sequence_parallel is not supported. Use --strategy tensor_sequence",
    ),
    "LLaMA-Factory, partial offload": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_partial_offload_config.json",
        {
            **{**EITHER, **STEP, "zero_allow_untested_optimizer": True},
            "zero_force_ds_cpu_optimizer": True,
            "zero_optimization": stage_3(
                overlap_comm=False, offload_optimizer={"device": "cpu", "pin_memory": False}
            ),
        },
    ),
    "LLaMA-Factory, activation checkpointing": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/hparam_sweep/ds_z3_e11_act_ckpt.json",
        {
            **{**STEP, **BF16, "fp16": {"enabled": False}, "zero_allow_untested_optimizer": True},
            "activation_checkpointing": {
                "partition_activations": True,
                "contiguous_memory_optimization": True,
            },
            "zero_optimization": stage_3(
                reduce_scatter=True,
                allgather_partitions=True,
                allgather_bucket_size=200000000,
                reduce_bucket_size=200000000,
                stage3_prefetch_bucket_size=200000000,
                stage3_param_persistence_threshold=500000,
                stage3_module_granularity_threshold=16,
            ),
        },
    ),
    "LLaMA-Factory, quantized gradients": PublicFile(
        "hiyouga/LLaMA-Factory examples/deepspeed/hparam_sweep/ds_z3_e9_quant_grads.json",
        {
            **{**STEP, **BF16, "zero_allow_untested_optimizer": True},
            "zero_optimization": stage_3(zero_quantized_gradients=True),
        },
        "zero_optimization.zero_quantized_gradients=true is not supported",
    ),
    "LMFlow, zero 2": PublicFile(
        "OptimalScale/LMFlow configs/ds_config_zero2.json",
        {
            **{**EITHER, **STEP, **QUIET, "optimizer": ADAMW, "steps_per_print": 2000},
            "zero_optimization": stage_2(offload_optimizer=_PINNED),
        },
    ),
    "LMFlow, zero 3": PublicFile(
        "OptimalScale/LMFlow configs/ds_config_zero3.json",
        {
            **{**EITHER, **STEP, **QUIET, "steps_per_print": 2000},
            "zero_optimization": stage_3(
                offload_optimizer=_CPU,
                stage3_max_live_parameters=2e10,
                stage3_max_reuse_distance=2e10,
            ),
        },
    ),
    "FastChat": PublicFile(
        "lm-sys/FastChat playground/deepspeed_config_s3.json",
        {
            **{"fp16": fp16("auto"), **SIZES, **auto("gradient_accumulation_steps")},
            "zero_optimization": {
                **{"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
                **{"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e12},
                **{"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9},
                **{"stage3_prefetch_bucket_size": 5e8, "stage3_param_persistence_threshold": 1e6},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
    ),
    "LLaVA": PublicFile(
        "haotian-liu/LLaVA scripts/zero3_offload.json",
        {
            **{**STEP, **QUIET, **BF16, "fp16": fp16("auto"), "optimizer": ADAMW},
            **{"scheduler": WARMUP, "steps_per_print": 1e5},
            "zero_optimization": {
                **{"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
                **{"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9},
                **auto("reduce_bucket_size", "stage3_prefetch_bucket_size"),
                **auto("stage3_param_persistence_threshold"),
                **{"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9},
                "gather_16bit_weights_on_model_save": True,
            },
        },
    ),
    "ChatGLM-6B": PublicFile(
        "THUDM/ChatGLM-6B ptuning/deepspeed.json",
        {
            **auto("train_micro_batch_size_per_gpu"),
            **{"fp16": fp16("auto"), "zero_allow_untested_optimizer": True},
            "zero_optimization": stage_2(5e8, overlap=False),
        },
    ),
    "accelerate, zero 1": PublicFile(
        "huggingface/accelerate examples/deepspeed_config_templates/zero_stage1_config.json",
        {
            **{**STEP, **QUIET, "fp16": fp16(), "gradient_accumulation_steps": 1},
            "optimizer": {
                "type": "AdamW",
                "params": {**auto("lr", "weight_decay"), "torch_adam": True, "adam_w_mode": True},
            },
            "scheduler": DECAY,
            "zero_optimization": {**stage_2(), "stage": 1, "reduce_bucket_size": "auto"},
            "steps_per_print": 2000,
        },
        NO_FP16,
    ),
    "accelerate, zero 3": PublicFile(
        "huggingface/accelerate "
        "examples/deepspeed_config_templates/zero_stage3_offload_config.json",
        {
            **{**STEP, **QUIET, "fp16": fp16(), "gradient_accumulation_steps": 1},
            **{"optimizer": {"type": "AdamW", "params": auto("lr", "weight_decay")}},
            "scheduler": DECAY,
            "zero_optimization": stage_3(
                offload_optimizer=_PINNED,
                offload_param=_PINNED,
                stage3_gather_16bit_weights_on_model_save="auto",
            ),
            "steps_per_print": 2000,
        },
        NO_FP16,
    ),
    "axolotl, zero 1": PublicFile(
        "axolotl-ai-cloud/axolotl deepspeed_configs/zero1.json",
        {
            **{**SIZES, **QUIET, **auto("gradient_accumulation_steps"), "optimizer": ADAMW},
            **{"bf16": {"enabled": "auto"}, "fp16": fp16("auto", 32, auto_cast=False)},
            "zero_optimization": {"stage": 1, "overlap_comm": True},
        },
    ),
    "axolotl, torch.compile": PublicFile(
        "axolotl-ai-cloud/axolotl deepspeed_configs/zero2_torch_compile.json",
        {
            **{**STEP, **QUIET, "compile": {"disable": False, "backend": "inductor"}},
            **{"bf16": {"enabled": "auto"}, "fp16": fp16("auto", 32, auto_cast=False)},
            "zero_optimization": {
                **{"stage": 2, "offload_optimizer": _CPU, "contiguous_gradients": True},
                "overlap_comm": True,
            },
        },
    ),
    "axolotl, zero 3": PublicFile(
        "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16.json",
        {
            **{**STEP, **QUIET, **BF16},
            "zero_optimization": {
                **{"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
                **{"sub_group_size": 0, "max_live_parameters": 0, "max_reuse_distance": 0},
                **auto("reduce_bucket_size", "prefetch_bucket_size"),
                **auto("param_persistence_threshold"),
                "gather_16bit_weights_on_model_save": True,
            },
        },
    ),
    "stanford_alpaca": PublicFile(
        "tatsu-lab/stanford_alpaca configs/default_offload_opt_param.json",
        {
            **{**STEP, **QUIET, "bf16": {"enabled": "auto"}, "optimizer": ADAMW},
            **{"scheduler": DECAY, "steps_per_print": 5},
            "zero_optimization": stage_3(
                offload_optimizer=_PINNED,
                offload_param=_PINNED,
                stage3_gather_16bit_weights_on_model_save=False,
            ),
        },
    ),
    "WizardMath": PublicFile(
        "nlpxucan/WizardLM WizardMath/config/deepspeed_config.json",
        {
            **{**SIZES, **QUIET, "fp16": fp16(power=32, auto_cast=False)},
            "zero_optimization": stage_3(
                offload_optimizer=_PINNED,
                offload_param=_PINNED,
                sub_group_size=0,
                stage3_max_live_parameters=0,
                stage3_max_reuse_distance=0,
            ),
        },
        NO_FP16,
    ),
    "dolly": PublicFile(
        "databrickslabs/dolly config/ds_z3_bf16_config.json",
        {
            **{**STEP, **QUIET, "bf16": {"enabled": "auto"}, "optimizer": ADAMW},
            **{"scheduler": WARMUP, "zero_optimization": stage_3(), "steps_per_print": 2000},
            "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "dolly"},
        },
    ),
    "Qwen": PublicFile(
        "QwenLM/Qwen finetune/ds_config_zero2.json",
        {
            **{**EITHER, **STEP, **QUIET, "optimizer": ADAMW, "scheduler": WARMUP},
            **{"steps_per_print": 100},
            "zero_optimization": stage_2(offload_optimizer={"device": "none", "pin_memory": True}),
        },
    ),
    "Megatron-DeepSpeed": PublicFile(
        "microsoft/Megatron-DeepSpeed "
        "examples_deepspeed/rebase/ds_config_gbs256_mbs32_log1_zero1.json",
        {
            **{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 32},
            **{**QUIET, "steps_per_print": 1, "zero_optimization": {"stage": 1}},
            **{"gradient_clipping": 1.0, "prescale_gradients": False},
            "fp16": fp16(power=11, loss_scale_window=500),
        },
        NO_FP16,
    ),
    "Megatron-DeepSpeed, random LTD": PublicFile(
        "microsoft/Megatron-DeepSpeed "
        "examples/random_ltd/configs/ds_config_gpt_0.125B_TEMPLATE.json",
        {
            **{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 32},
            **{**QUIET, **BF16, "zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
            "fp16": fp16(enabled=False, power=11),
            "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
            "dynamic_train": {"random_ltd": {"enabled": True, "total_layer_num": 12}},
        },
        "dynamic_train is not a key of DeepSpeed",
    ),
    "DeepSpeedExamples, CIFAR": PublicFile(
        "microsoft/DeepSpeedExamples cifar/ds_config.json",
        {
            **{**QUIET, "train_batch_size": 4, "steps_per_print": 2000},
            **{"optimizer": adam(weight_decay=3e-7), "gradient_clipping": 1.0},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000},
            },
            "prescale_gradients": False,
            "fp16": fp16(power=15, fp16_master_weights_and_grads=True),
            "zero_optimization": stage_2(50000000, cpu_offload=True),
        },
        NO_FP16,
    ),
    "DeepSpeedExamples, QANet": PublicFile(
        "microsoft/DeepSpeedExamples QANet-Pytorch/ds_bsz512_1cycle.json",
        {
            **{"train_batch_size": 512, "train_micro_batch_size_per_gpu": 32},
            **{"steps_per_print": 10, "optimizer": adam(weight_decay=3e-7)},
            "scheduler": {
                "type": "OneCycle",
                "params": {
                    **{"cycle_min_lr": 0.004, "cycle_max_lr": 0.015},
                    **{"cycle_first_step_size": 1000, "cycle_second_step_size": 100},
                    **{"cycle_first_stair_count": 100, "cycle_second_stair_count": 100},
                    **{"decay_step_size": 1000, "decay_lr_rate": 0.01},
                },
            },
        },
        "scheduler.params.cycle_momentum is true",
    ),
    "DeepSpeedExamples, 1-bit Adam": PublicFile(
        "microsoft/DeepSpeedExamples BingBertSquad/deepspeed_onebitadam_bsz96_config.json",
        {
            **{"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3},
            "optimizer": {
                "type": "OnebitAdam",
                "params": {"lr": 3e-5, "freeze_step": 400, "comm_backend_name": "nccl"},
            },
            **{"gradient_clipping": 1.0, "fp16": {"enabled": True}},
        },
        NO_FP16,
        "optimizer.type=OnebitAdam is not supported",
    ),
    "DeepSpeedExamples, Megatron": PublicFile(
        "microsoft/DeepSpeedExamples Megatron-LM/scripts/ds_zero2_config.json",
        {
            **{**QUIET, "train_batch_size": 16, "gradient_accumulation_steps": 1},
            **{"steps_per_print": 1, "zero_optimization": {"stage": 2}},
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            **{"gradient_clipping": 1.0, "fp16": fp16(power=None)},
            "activation_checkpointing": {"partition_activations": True},
        },
        NO_FP16,
    ),
    "DeepSpeedExamples, ZeRO-Infinity": PublicFile(
        "microsoft/DeepSpeedExamples "
        "Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json",
        {
            **{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            "zero_optimization": {
                **{"stage": 3, "stage3_max_live_parameters": 1e9},
                **{"stage3_max_reuse_distance": 1e8, "stage3_param_persitance_threshold": 1e5},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1},
            },
            **{"gradient_clipping": 1.0, "fp16": fp16(loss_scale=1024)},
            "aio": {"block_size": 1048576, "queue_depth": 16},
        },
        NO_FP16,
        "stage3_param_persitance_threshold .*did you mean 'stage3_param_persistence_threshold'",
    ),
    "DeepSpeedExamples, autotuning": PublicFile(
        "microsoft/DeepSpeedExamples autotuning/hf/dsconfigs/ds_config_fp16_tune.json",
        {
            **{**auto("train_micro_batch_size_per_gpu"), "fp16": {"enabled": True}},
            "autotuning": {"enabled": True, "overwrite": False, "fast": True},
        },
        NO_FP16,
        "zero_optimization.stage=0 shards nothing",
    ),
    "DeepSpeedExamples, Lamb": PublicFile(
        "microsoft/DeepSpeedExamples bing_bert/deepspeed_bsz64k_lamb_config_seq128.json",
        {
            **{"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64},
            "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "max_coeff": 0.3}},
            **{"gradient_clipping": 1.0, "fp16": {"enabled": True, "loss_scale": 0}},
            "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 4},
        },
        "sparse_attention is not supported. Leave it out",
        "sparse_attention is not supported. Leave it out",
    ),
    "DeepSpeedExamples, ZeroQuant": PublicFile(
        "microsoft/DeepSpeedExamples compression/bert/config/ds_config_W1A8_Qgroup64_fp16.json",
        {
            **{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 32},
            **{"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}},
            "compression_training": {
                "layer_reduction": {"enabled": False, "keep_number_layer": 5},
                "weight_quantization": {
                    "shared_parameters": {"enabled": True, "quantize_groups": 64},
                },
            },
        },
        "compression_training is not supported. Leave it out",
        "compression_training is not supported. Leave it out",
    ),
    "trlx": PublicFile(
        "CarperAI/trlx ds_config.json",
        {
            **{**SIZES, "gradient_clipping": 1.0, "gradient_accumulation_steps": 1},
            **{"fp16": {"enabled": False}, "bf16": {"enabled": False}},
            "zero_optimization": {
                **{"stage": 2, "offload_param": _CPU, "offload_optimizer": _CPU},
                **{"allgather_partitions": True, "allgather_bucket_size": 5e8},
                "contiguous_gradients": True,
            },
        },
    ),
    "CSC": PublicFile(
        "CSCfi/pytorch-ddp-examples ds_config.json",
        {
            **{**QUIET, "train_batch_size": 400, "steps_per_print": 2000},
            **{"optimizer": adam(weight_decay=3e-7), "gradient_clipping": 1.0},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000},
            },
            "prescale_gradients": False,
        },
        "zero_optimization.stage=0 shards nothing. Use --strategy ddp",
    ),
}
