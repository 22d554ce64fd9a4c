"""Tables of axolotl's keys: their meaning, and which contradict each other or do nothing."""

from __future__ import annotations

from bigtrain.explain.request import FileSection, said_true
from bigtrain.explain.tools.key_rules import KeyRule, KeyTable
from bigtrain.explain.tools.trainer_keys import FsdpOptions

AXOLOTL_MARKS = ("base_model",)
"""Keys that identify a file of axolotl."""
ATTENTION = (
    *("flash_attention", "sdp_attention", "xformers_attention", "flex_attention"),
    *("s2_attention", "eager_attention", "sage_attention"),
)
"""Switches of the kind of attention. At most one may be on."""
_ADAPTER = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_*", "lora_modules_to_save"),
    *("lora_fan_in_fan_out", "lora_qkv_kernel", "lora_mlp_kernel", "lora_o_kernel"),
    *("peft_*", "loraplus_*", "bnb_config_kwargs"),
)
CHUNKING = ("liger_fused_linear_cross_entropy", "chunked_cross_entropy", "cut_cross_entropy")
"""Switches of losses that never compute all logits at once."""


def has_fsdp(section: FileSection) -> bool:
    """Whether a file uses FSDP."""
    return bool(section.get("fsdp") or section.get("fsdp_config"))


def _knows_documents(section: FileSection) -> bool:
    named = str(section.get("attn_implementation") or "")
    return named not in ("", "eager") or any(
        section.is_on(key) for key in ATTENTION if key not in ("s2_attention", "eager_attention")
    )


def _offloads(section: FileSection) -> bool:
    options = section.inner("fsdp_config")
    return options is not None and FsdpOptions(options).is_on("offload_params")


def fsdp_version_of(section: FileSection) -> int:
    """Return the version of FSDP, 1 or 2; the default is 1, as in axolotl."""
    options = section.inner("fsdp_config")
    said = section.get("fsdp_version") or (options and FsdpOptions(options).get("version"))
    return 2 if str(said) == "2" else 1


_RULES = (
    KeyRule(
        "contradiction",
        ("bf16", "fp16"),
        lambda s: said_true(s.get("bf16")) and said_true(s.get("fp16")),
        "there is one precision",
        "Leave fp16 out.",
    ),
    KeyRule(
        "contradiction",
        ("deepspeed", "fsdp", "fsdp_config"),
        lambda s: bool(s.get("deepspeed")) and has_fsdp(s),
        "both shard the same states, and axolotl refuses both; it is forecast with DeepSpeed",
        "Leave one of them out.",
    ),
    KeyRule(
        "contradiction",
        ("load_in_8bit", "load_in_4bit"),
        lambda s: s.is_on("load_in_8bit") and s.is_on("load_in_4bit"),
        "the weights have one dtype",
        "Leave load_in_8bit out.",
    ),
    KeyRule(
        "contradiction",
        ("load_in_8bit", "load_in_4bit"),
        lambda s: not s.get("adapter") and not s.get("peft"),
        "quantised weights cannot be trained, and no adapter is",
        "Write adapter: qlora, or load_in_4bit: false.",
    ),
    KeyRule(
        "contradiction",
        ("adapter",),
        lambda s: (
            s.get("adapter") == "qlora"
            and not (s.is_on("load_in_4bit") or s.get("peft") or s.is_on("gptq"))
        ),
        "qlora trains adapters of weights in 4 bits, and load_in_4bit is not on",
        "Write load_in_4bit: true, or adapter: lora.",
    ),
    KeyRule(
        "contradiction",
        ("sample_packing",),
        lambda s: not _knows_documents(s),
        "without an attention that knows where documents end, packed documents see each other",
        "Write flash_attention: true or sdp_attention: true.",
    ),
    KeyRule(
        "contradiction",
        ATTENTION,
        lambda s: sum(s.is_on(key) for key in ATTENTION) > 1,
        "there is one attention",
        "Keep one of them.",
    ),
    KeyRule(
        "contradiction",
        ("gradient_accumulation_steps", "batch_size"),
        lambda s: bool(s.get("batch_size")) and bool(s.get("gradient_accumulation_steps")),
        "batch_size decides the accumulation, and axolotl refuses both",
        "Leave batch_size out.",
    ),
    KeyRule(
        "contradiction",
        ("warmup_steps", "warmup_ratio"),
        lambda s: bool(s.get("warmup_steps")) and bool(s.get("warmup_ratio")),
        "both say how long the warm-up is",
        "Leave one of them out.",
    ),
    KeyRule(
        "contradiction",
        ("optimizer", "fsdp_version"),
        lambda s: (
            str(s.get("optimizer")) in ("adamw_8bit", "adamw_bnb_8bit")
            and has_fsdp(s)
            and fsdp_version_of(s) == 2
        ),
        "the optimizer of bitsandbytes fails on the shards of FSDP 2",
        "Write optimizer: adamw_torch_8bit.",
    ),
    KeyRule(
        "contradiction",
        ("optimizer",),
        lambda s: _offloads(s) and "bit" in str(s.get("optimizer") or ""),
        "optimizers in 8 and 4 bits run on a GPU, and offload_params moves their states away",
        "Write optimizer: adamw_torch_fused, or offload_params: false.",
    ),
    KeyRule(
        "no effect",
        _ADAPTER,
        lambda s: not s.get("adapter"),
        "adapter is not set, so all parameters are trained",
        "Write adapter: lora, or leave them out.",
        even_off=False,
    ),
    KeyRule(
        "no effect",
        ("gradient_checkpointing_kwargs",),
        lambda s: not s.is_on("gradient_checkpointing"),
        "gradient_checkpointing is not on",
        "Write gradient_checkpointing: true, or leave it out.",
    ),
    KeyRule(
        "no effect",
        ("num_epochs",),
        lambda s: bool(s.get("max_steps")),
        "max_steps decides the length",
        "Leave it out.",
    ),
    KeyRule(
        "no effect",
        ("group_by_length", "pad_to_sequence_len"),
        lambda s: s.is_on("sample_packing") and s.is_on("group_by_length"),
        "packed samples have one length",
        "Leave group_by_length out.",
    ),
    KeyRule(
        "no effect",
        ("eval_sample_packing", "sample_packing_*"),
        lambda s: not s.is_on("sample_packing") and not s.is_on("eval_sample_packing"),
        "sample_packing is not on",
        "Leave it out.",
    ),
    KeyRule(
        "no effect",
        ("fsdp_version", "fsdp_final_state_dict_type"),
        lambda s: not has_fsdp(s),
        "neither fsdp nor fsdp_config is set",
        "Leave it out.",
    ),
)
AXOLOTL_KEYS = KeyTable(
    tool="axolotl",
    numbers={
        "micro_batch_size": ("train.micro_batch_size", "count"),
        "gradient_accumulation_steps": ("train.accumulation_steps", "count"),
        "sequence_len": ("data.args.sequence_length", "count"),
        "learning_rate": ("optim.lr", "number"),
        "weight_decay": ("optim.weight_decay", "number"),
        "adam_epsilon": ("optim.eps", "number"),
        "warmup_steps": ("optim.warmup_steps", "number"),
        "num_epochs": ("train.epochs", "number"),
        "max_steps": ("train.steps", "count"),
    },
    read=frozenset(
        (
            *("base_model", "adapter", "load_in_4bit", "load_in_8bit", "peft", "batch_size"),
            *("bf16", "fp16", "bfloat16", "float16", "float32", "tf32", "max_grad_norm"),
            *("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading"),
            *("optimizer", "lr_scheduler", "deepspeed", "fsdp", "fsdp_config", "fsdp_version"),
            *("sample_packing", "eval_sample_packing", "plugins", "attn_implementation"),
            *("warmup_ratio", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
            *("lora_target_linear", "lora_modules_to_save", "world_size", "bnb_config_kwargs"),
            *("tensor_parallel_size", "dp_shard_size", "dp_replicate_size", *ATTENTION),
            *CHUNKING,
        )
    ),
    outside=(
        *("base_model_*", "tokenizer*", "processor_type", "model_type", "trust_remote_code"),
        *("is_*_derived_model", "datasets", "test_datasets", "dataset*", "shuffle_*", "chat_*"),
        *("val_set_size", "output_dir", "hub_*", "wandb_*", "mlflow_*", "comet_*", "use_*board"),
        *("gradio_*", "eval_*", "evals_per_epoch", "evaluation_strategy", "save_*", "saves_*"),
        *("logging_steps", "special_tokens", "tokens", "added_tokens_*", "strict", "seed"),
        *("resume_from_checkpoint", "auto_resume_*", "early_stopping_patience", "train_on_inputs"),
        *("lr_scheduler_kwargs", "cosine_*", "lr_*", "adam_beta*", "loss_watchdog_*"),
        *("push_dataset_to_hub", "hf_use_auth_token", "dataloader_*", "ddp_timeout", "debug"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "local_rank"),
        *("pad_to_sequence_len", "sample_packing_*", "group_by_length", "min_sample_len"),
        *("excess_length_strategy", "remove_unused_columns", "low_cpu_mem_usage", "xformers_*"),
        *("lora_model_dir", "lora_on_cpu", "lora_fan_in_fan_out", "qlora_sharded_model_loading"),
        *("loraplus_*", "merge_*", "profiler_*", "include_tokens_per_second", "accelerator_config"),
        *(
            "experimental_skip_move_to_device",
            "fsdp_final_state_dict_type",
            "default_system_message",
        ),
        *("eot_tokens", "role*", "field*", "do_*", "gc_steps", "ddp_find_unused_parameters"),
        *("ddp_broadcast_buffers", "mean_resizing_embeddings", "streaming", "trl", "vllm", "ray_*"),
        *("use_ray", "otel_*", "device_map", "s2_*", "skip_prepare_dataset", "unsloth_rope"),
    ),
    not_forecast={
        "rl": ("preference training runs a second model", "Use a file for supervised training."),
        "reward_model": ("reward models have another loss", "Forecast a file without it."),
        "process_reward_model": ("reward models have another loss", "Forecast a file without it."),
        "context_parallel_size": (
            "a sequence that is spread over ranks; activations are forecast for whole sequences",
            "Use --strategy fsdp+tensor_sequence mesh.tp=N.",
        ),
        "sequence_parallel_degree": (
            "a sequence that is spread over ranks; activations are forecast for whole sequences",
            "Use --strategy fsdp+tensor_sequence mesh.tp=N.",
        ),
        "expert_parallel_size": ("experts are on every rank here", "Use --strategy fsdp."),
        "unfrozen_parameters": (
            "its regular expressions; all parameters are forecast as trained",
            "Use model.freeze=['*','!PATTERN'].",
        ),
        "torch_compile*": (
            "compiled programs keep other activations",
            "Use train.compile=blocks, and measure with bigtrain compare.",
        ),
        "lora_*_kernel": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "liger_*": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "unsloth_*": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "flash_attn_*": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "flash_optimum": ("fused kernels keep fewer activations", "Expect a lower peak."),
        "peft_use_dora": ("DoRA has no counterpart; it is forecast as LoRA", "Leave it out."),
        "peft_use_rslora": ("rsLoRA scales otherwise and takes as much memory", "Leave it out."),
        "peft_*": ("it has no counterpart; all layers are adapted alike", "Leave it out."),
        "lora_target_parameters": ("adapters of single parameters", "Name layers."),
        "neftune_noise_alpha": ("noise on the embeddings; it takes no memory", "Leave it out."),
        "relora*": ("restarts of adapters have no counterpart", "Leave it out."),
        "lisa_*": ("layers that change during training", "Leave it out."),
        "gptq": ("weights in GPTQ's format cannot be trained here", "Use the plain weights."),
        "fp8*": ("fp8 has no counterpart; it is forecast as bf16", "Use bf16."),
        "qat": ("training with quantisation in mind has no counterpart", "Leave it out."),
        "quantization": ("it is for after the training", "Leave it out."),
        "auto_find_batch_size": ("the batch is found by running", "Use the planner's batch."),
        "ddp_bucket_cap_mb": (
            "sizes of messages",
            "With ddp use strategy.replicate.bucket_size=25MiB.",
        ),
        "resize_token_embeddings_to_32x": ("up to 31 more rows of embeddings", "Expect the same."),
        "embedding_lr*": ("a learning rate for embeddings alone", "Leave it out."),
        "optim_*": ("arguments of the optimizer", "Set keys of optim."),
        "max_memory": ("a model spread over devices layer by layer", "Use --strategy 1f1b."),
        "gpu_memory_limit": ("a limit for loading", "Use memory.cap=SIZE."),
        "noisy_embedding_alpha": ("noise on the embeddings; it takes no memory", "Leave it out."),
        "batch_flattening": ("samples without padding", "Use data.args.packing=true."),
        "pretraining_dataset": ("a stream of data", "Use data.name=text."),
        "use_pose": ("positions with gaps take as much memory", "Leave it out."),
    },
    rules=_RULES,
)
