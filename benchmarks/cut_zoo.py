"""Cut models of transformers and timm into 2 and 4 stages, and compare with the whole model.

bigtrain needs neither library. Install them next to it in a separate environment:

    python -m venv /tmp/zoo && /tmp/zoo/bin/pip install -e . transformers timm torchvision
    OMP_NUM_THREADS=1 /tmp/zoo/bin/python benchmarks/cut_zoo.py

transformers' models are built from tiny configurations, timm's unchanged, without weights; nothing
is downloaded. Each model runs once in training and once in evaluation. The loss, every gradient,
every buffer and the output are compared in float64. Words on the command line select models by a
part of their name. The table is printed, and its rows are written to
benchmarks/results/cut_zoo.json.
"""

from __future__ import annotations

import copy
import json
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn

from bigtrain.cutting.cut import Cut, copy_modules, cut_at
from bigtrain.cutting.cut_points import legal_points
from bigtrain.cutting.traced_model import Numerics, TracedModel
from bigtrain.data.loader import MicroBatch
from bigtrain.models.caches import switch_off_caches
from bigtrain.tensors.tree import map_tensors, tree_tensors

IN_FLOAT32 = {"mixtral", "xglm"}
"""They have operations that are not there in float64."""
CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results" / "cut_zoo.json"
WORDS = 60
TEXT = {"vocab_size": WORDS}
SMALL = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0},
}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
SEQ = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "decoder_start_token_id": 1},
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
VIT = {"image_size": 32, "patch_size": 8, "num_labels": 5}
CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
SEQ2SEQ, IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"
# Type of model: the class of its head, and the arguments of its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (CAUSAL, GPT),
    "gptj": (CAUSAL, {**GPT, "rotary_dim": 4}),
    "gpt_neo": (
        CAUSAL,
        {**SMALL, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    ),
    "gpt_neox": (CAUSAL, SMALL),
    "gpt_bigcode": (CAUSAL, GPT),
    "codegen": (CAUSAL, {**GPT, "rotary_dim": 4}),
    "openai-gpt": (CAUSAL, GPT),
    "llama": (CAUSAL, {**SMALL, "num_key_value_heads": 2}),
    "mistral": (CAUSAL, {**SMALL, "num_key_value_heads": 2, "sliding_window": 4}),
    "qwen2": (CAUSAL, {**SMALL, "num_key_value_heads": 2}),
    "qwen3": (CAUSAL, {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma": (CAUSAL, {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": (CAUSAL, {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "phi": (CAUSAL, SMALL),
    "phi3": (CAUSAL, SMALL),
    "stablelm": (CAUSAL, {**SMALL, "num_key_value_heads": 2}),
    "olmo": (CAUSAL, SMALL),
    "starcoder2": (CAUSAL, {**SMALL, "num_key_value_heads": 2}),
    "cohere": (CAUSAL, {**SMALL, "num_key_value_heads": 2}),
    "falcon": (CAUSAL, SMALL),
    "mixtral": (CAUSAL, {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "opt": (CAUSAL, {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": (CAUSAL, {"hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "mpt": (CAUSAL, {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}),
    "xglm": (
        CAUSAL,
        {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 48, "pad_token_id": 0},
    ),
    "mamba": (CAUSAL, {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4}),
    "bert": (MASKED, SMALL),
    "roberta": (MASKED, SMALL),
    "albert": (MASKED, {**SMALL, "embedding_size": 16}),
    "electra": (MASKED, {**SMALL, "embedding_size": 16}),
    "distilbert": (MASKED, {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48}),
    "deberta-v2": (MASKED, {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": (MASKED, SMALL),
    "camembert": (MASKED, SMALL),
    "convbert": (MASKED, {**SMALL, "embedding_size": 32}),
    "fnet": (MASKED, {**SMALL, "tpu_short_seq_length": 12}),
    "mobilebert": (MASKED, {**SMALL, "embedding_size": 16, "intra_bottleneck_size": 32}),
    "xlm": (MASKED, {"emb_dim": 32, "n_layers": 4, "n_heads": 4}),
    "modernbert": (MASKED, {**SMALL, "global_attn_every_n_layers": 2}),
    "t5": (SEQ2SEQ, T5),
    "mt5": (SEQ2SEQ, T5),
    "bart": (SEQ2SEQ, SEQ),
    "mbart": (SEQ2SEQ, SEQ),
    "pegasus": (SEQ2SEQ, SEQ),
    "marian": (SEQ2SEQ, SEQ),
    "vit": (IMAGES, {**SMALL, **VIT}),
    "deit": (IMAGES, {**SMALL, **VIT, "architectures": ["DeiTForImageClassification"]}),
    "beit": (IMAGES, {**SMALL, **VIT}),
    "dinov2": (IMAGES, {**SMALL, **VIT}),
    "swin": (
        IMAGES,
        {
            **{"image_size": 64, "window_size": 4, "embed_dim": 8, "depths": [2, 2]},
            **{"num_heads": [2, 2], "num_labels": 5},
        },
    ),
    "convnext": (IMAGES, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}),
    "resnet": (IMAGES, {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4}),
}
TIMM = re.findall(
    r"\w+",
    """
beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_tiny coatnet_0_224 convit_tiny
convmixer_768_32 convnext_atto convnextv2_atto crossvit_tiny_240 cspdarknet53 cspresnet50
davit_tiny deit3_small_patch16_224 densenet121 dla34 dm_nfnet_f0 dpn48b edgenext_xx_small
efficientformer_l1
efficientnet_b0 eva02_tiny_patch14_224 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_100
hardcorenas_a hrnet_w18_small inception_v4 levit_128s maxvit_pico_rw_256 mixer_s32_224
mobilenetv3_small_100 mobilevit_xxs nest_tiny nfnet_f0 pit_ti_224 poolformer_s12
pvt_v2_b0 regnetx_002 regnety_002 repvgg_a0 res2net50_26w_4s resmlp_12_224 resnest14d resnet18
rexnet_100 selecsls42 seresnet18 sequencer2d_s skresnet18 swin_tiny_patch4_window7_224
swinv2_tiny_window8_256 tnt_s_patch16_224 tresnet_m twins_pcpvt_small vgg11 visformer_tiny
vit_tiny_patch16_224 volo_d1_224 xcit_nano_12_p16_224 xception41
""",
)


class ByKeyword(nn.Module):
    """Calls a model that takes keywords with a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        return self.model(**inputs)


class Squares:
    """A loss of all floating-point tensors in an output."""

    def __call__(self, output: Any, target: Any, count: float | None = None) -> Tensor:
        del target, count
        tensors = [t for t in tree_tensors(output) if t.is_floating_point()]
        return torch.stack([(t**2).mean() + t.mean() for t in tensors]).sum()

    def count(self, target: Any) -> int:
        del target
        return 1


def of_transformers(kind: str) -> tuple[nn.Module, Any]:
    head, options = MODELS[kind]
    text = {} if head == IMAGES else TEXT
    config = transformers.AutoConfig.for_model(kind, **{**text, **options})
    model = getattr(transformers, head).from_config(config)
    if head == IMAGES:
        inputs = {"pixel_values": torch.randn(2, 3, *[options.get("image_size", 32)] * 2)}
        return ByKeyword(model), inputs
    ids = torch.randint(3, WORDS, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 9:] = 0
    if head == SEQ2SEQ:
        inputs["decoder_input_ids"] = torch.randint(3, WORDS, (2, 7))
    switch_off_caches(model)  # as an engine does, which is not used here
    return ByKeyword(model), inputs


def of_timm(name: str) -> tuple[nn.Module, Any]:
    model = timm.create_model(name, pretrained=False, num_classes=5)
    size = model.default_cfg["input_size"][-1]
    if not getattr(
        model.default_cfg, "fixed_input_size", model.default_cfg.get("fixed_input_size")
    ):
        size = min(size, 96)
    return model, torch.randn(2, 3, size, size)


def balanced(traced_model: TracedModel, micro_batch: MicroBatch, stages: int) -> tuple[Cut, int]:
    """Return a cut with equal work in each stage, and the number of possible places."""
    trace, _ = traced_model.trace(micro_batch, training=True)
    evaluated, _ = traced_model.trace(micro_batch, training=False)
    points, refused = legal_points(trace)
    others, also = legal_points(evaluated)
    common = {(point.name, point.number) for point in others}
    points = [point for point in points if (point.name, point.number) in common]
    if len(points) < stages - 1:
        why = sorted({*refused.values(), *also.values()})
        raise RuntimeError(f"{len(points)} places to cut: {'; '.join(why)}")
    work = [(cost.tick, cost.flops + cost.nbytes) for cost in trace.costs]
    total = sum(amount for _, amount in work)
    before = {p.call: sum(amount for tick, amount in work if tick < p.tick) for p in points}
    chosen: set[int] = set()
    for stage in range(1, stages):
        left = [call for call in before if call not in chosen]
        chosen.add(min(left, key=lambda call: abs(before[call] - total * stage / stages)))
    return cut_at(trace, sorted(chosen), traced_model), len(points)


def outcome(model: nn.Module, micro_batch: MicroBatch, cut: Cut | None) -> dict[str, Tensor]:
    """Return all results of a training step and of an evaluation, by name."""
    tensors: dict[str, Tensor] = {}
    for training in (True, False):
        torch.manual_seed(0)
        buffers = dict(model.named_buffers())
        with torch.set_grad_enabled(training):
            if cut is None:
                result = model.train(training)(micro_batch.inputs)
                result = Squares()(result, None) if training else result
            else:
                result = ()
                for index in range(cut.stages):
                    tree = copy_modules(model)
                    cut.strip(tree, [index], CPU)
                    stage = cut.stage(tree, index, Squares(), CPU).train(training)
                    scale = 1.0 if training else None
                    result = stage(*result, micro_batch=micro_batch, scale=scale)
                    buffers |= dict(stage.named_buffers())  # it may have assigned new ones
        if training:
            result.backward()
            tensors["loss"] = result.detach()
            tensors |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            buffers = buffers if cut is not None else dict(model.named_buffers())
            tensors |= {f"{n} after": b.clone() for n, b in buffers.items()}
        else:
            tensors |= {f"output {i}": tensor for i, tensor in enumerate(tree_tensors(result))}
    return tensors


def largest(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the tensor's largest number if that is above 1."""
    if expected.keys() != actual.keys():
        raise RuntimeError(f"only one of the two has {sorted(expected.keys() ^ actual.keys())[:3]}")
    worst = 0.0
    for key, tensor in expected.items():
        if tensor.numel():
            scale = max(1.0, float(tensor.to(torch.complex128).abs().max()))
            gap = (tensor.to(torch.complex128) - actual[key].to(torch.complex128)).abs()
            worst = max(worst, float(gap.max()) / scale)
    return worst


def check(make: Callable[[str], tuple[nn.Module, Any]], name: str) -> dict[str, Any]:
    """Return one row of the table."""
    row: dict[str, Any] = {"name": name, "library": make.__name__.removeprefix("of_")}
    begun = time.perf_counter()
    torch.manual_seed(0)
    try:
        model, inputs = make(name)
        double = name not in IN_FLOAT32
        model = model.double() if double else model
        inputs = map_tensors(
            inputs, lambda t: t.double() if double and t.is_floating_point() else t
        )
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        micro_batch = MicroBatch(inputs, torch.zeros(2), 1, 2)
        traced_model = TracedModel(model, Squares(), CPU, Numerics())
        reference = None
        for stages in (2, 4):
            cut, row["legal_cuts"] = balanced(traced_model, micro_batch, stages)
            reference = reference or outcome(copy.deepcopy(model), micro_batch, None)
            gap = largest(reference, outcome(copy.deepcopy(model), micro_batch, cut))
            row[f"difference_{stages}"] = gap
            row[f"places_{stages}"] = [call_site for call_site, _ in cut.call_sites]
            if not gap <= (1e-9 if double else 1e-4):
                raise RuntimeError(f"{stages} stages differ by {gap:.2g}")
        row["works"] = True
    except Exception as error:  # noqa: BLE001 - the table says what it was
        row["works"] = False
        row["reason"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
    row["seconds"] = round(time.perf_counter() - begun, 1)
    return row


def show(row: dict[str, Any]) -> None:
    gaps = [f"{row[key]:.0e}" if key in row else "-" for key in ("difference_2", "difference_4")]
    print(
        f"{row['library']:13}{row['name']:32}{row.get('legal_cuts', '-'):>6}"
        f"{gaps[0]:>8}{gaps[1]:>8}{row['seconds']:>8}  {row.get('reason', '')}",
        flush=True,
    )


def save(row: dict[str, Any]) -> None:
    """Write one row into the file; it replaces an older one of the same model."""
    stored = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    key = (row["library"], row["name"])
    rows = [r for r in stored if (r["library"], r["name"]) != key] + [row]
    order = [*MODELS, *TIMM]
    rows.sort(key=lambda r: (r["library"] == "timm", order.index(r["name"])))
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions |= {"transformers": transformers.__version__, "timm": timm.__version__}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    words = sys.argv[1:]
    rows = []
    for make, names in ((of_transformers, list(MODELS)), (of_timm, TIMM)):
        for name in names:
            if not words or any(word in name for word in words):
                rows.append(check(make, name))
                show(rows[-1])
                save(rows[-1])
    print(f"{sum(row['works'] for row in rows)} of {len(rows)} work")


if __name__ == "__main__":
    main()
