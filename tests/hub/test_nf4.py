"""`model.lora.quantize=nf4`: weights in 4 bits, held to torchao's own; and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.errors import CheckpointError, ConfigError
from bigtrain.job.load import job_from_keys, load_job
from bigtrain.job.schema import LoraConfig, ModelConfig

pytest.importorskip("peft")
torchao = pytest.importorskip("torchao.quantization")
from support import hub_models, lora_runs  # noqa: E402

from bigtrain.assembly.make_plan import make_plan  # noqa: E402
from bigtrain.assembly.resolve import resolve_plan  # noqa: E402
from bigtrain.core.state import check_shapes  # noqa: E402
from bigtrain.core.workload import Workload  # noqa: E402
from bigtrain.data.loader import MicroBatch  # noqa: E402
from bigtrain.engine.first_batch import example_batch  # noqa: E402
from bigtrain.engine.setup import frozen_notes  # noqa: E402
from bigtrain.hub import lora, nf4  # noqa: E402
from bigtrain.hub.adapter_files import AdapterRecord  # noqa: E402
from bigtrain.hub.lora import adapters_of, attach, quantized_value  # noqa: E402
from bigtrain.hub.nf4 import Nf4Layout, Nf4Linear, dequantized, parameter_elements  # noqa: E402
from bigtrain.losses.loss import as_loss  # noqa: E402
from bigtrain.models.blueprint import describe  # noqa: E402
from bigtrain.models.spec import ModelSpec  # noqa: E402
from bigtrain.tensors.fake_mode import FakeMode  # noqa: E402
from bigtrain.tensors.op_cost import REPEAT_COUNT  # noqa: E402
from bigtrain.tensors.shards import StateTensor  # noqa: E402
from bigtrain.tracing.parameter_uses import parameter_uses  # noqa: E402

SHAPES = [(64, 64), (256, 128), (192, 576), (3, 64), (128, 1000), (1, 64), (448, 61)]
KEY = "model.lora.quantize=nf4"


def packed(weight: Tensor) -> tuple[Tensor, Nf4Layout]:
    layout = Nf4Layout((weight.shape[0], weight.shape[1]))
    flat = weight.flatten()
    return nf4.quantized(lambda begin, end: flat[begin:end], layout, KEY), layout


def random_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Rows of different sizes, so that the scales differ."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape[0], 1, generator=generator)
    return torch.randn(shape, generator=generator) * sizes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scales_and_values_are_those_of_torchao(shape):
    weight = random_weight(shape)
    carrier, layout = packed(weight)
    theirs = torchao.to_nf4(weight, 64, layout.scale_block)
    _, mean, factors, scales, codes = layout.parts(carrier)
    assert torch.equal(codes.flatten(), theirs.quantized_data)
    assert torch.equal(scales, theirs.quantized_scalers)
    assert torch.equal(factors, theirs.quantization_factor)
    assert torch.equal(mean[0], theirs.scaler_mean)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(dequantized(carrier, layout, dtype), theirs.to(dtype)), dtype


def test_values_between_two_codes_are_decided_by_torchao():
    """Every fp32 number around the middle of two codes, where rounding decides."""
    table = torchao.to_nf4(torch.ones(1, 64), 64, 1).nf4
    middles = (table[1:] + table[:-1]) / 2
    steps = torch.arange(-300, 300, dtype=torch.int32)
    near = (middles.view(torch.int32)[:, None] + steps).view(torch.float32).flatten()
    blocks = near[: near.numel() // 63 * 63].view(-1, 63)
    weight = torch.cat([torch.ones(len(blocks), 1), blocks], dim=1)  # 1 is the scale of each
    carrier, layout = packed(weight)
    theirs = torchao.to_nf4(weight, 64, layout.scale_block)
    assert torch.equal(layout.parts(carrier)[4].flatten(), theirs.quantized_data)


def test_the_factors_divide_the_scales_evenly():
    assert Nf4Layout((4096, 4096)).scale_block == 256
    assert Nf4Layout((576, 576)).scale_block == 216  # 5184 blocks, which 256 does not divide
    assert Nf4Layout((7, 64)).scale_block == 7
    bits = 8 * Nf4Layout((4096, 14336)).nbytes / (4096 * 14336)
    assert bits == pytest.approx(4.127, abs=1e-3)


def test_a_large_weight_is_taken_in_pieces_and_a_block_of_zeros_stays_zero(monkeypatch):
    weight = random_weight((512, 256))
    weight[3] = 0
    carrier, layout = packed(weight)
    whole = dequantized(carrier, layout, torch.bfloat16)
    assert not whole[3].any()
    monkeypatch.setattr(nf4, "PIECE", 1 << 12)
    assert torch.equal(dequantized(carrier, layout, torch.bfloat16), whole)
    view = torch.cat([torch.zeros(3, dtype=torch.uint8), carrier])[3:]
    assert torch.equal(dequantized(view, layout, torch.bfloat16), whole)
    assert not dequantized(*packed(torch.zeros(2, 64)), torch.float32).any()


def test_without_values_three_pieces_stand_for_all(monkeypatch):
    layout = Nf4Layout((4096, 1000))
    monkeypatch.setattr(nf4, "PIECE", 1 << 18)  # 16 pieces, the last one smaller
    represented, ran = 0, []

    def count(func, args, kwargs):
        nonlocal represented
        if func is torch.ops.aten.embedding.default:
            ran.append(args[1].shape[0])
            represented += REPEAT_COUNT.get() * args[1].shape[0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            count(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    for device in ("meta", "cpu"):
        represented = 0
        ran.clear()
        with FakeMode(), Watch():
            carrier = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
            nf4._dequantized(carrier, layout, torch.bfloat16)
        assert len(ran) == 3
        assert represented == layout.blocks


def test_one_pass_shows_which_adapters_are_trained():
    config = ModelConfig.model_validate(
        {"name": "gpt", "args": {"width": 64, "num_heads": 2}, "lora": {"rank": 2, **QUANTIZE}}
    )
    model = ModelSpec.of(config).describe(num_classes=None, sequence_length=None).model
    ids = torch.zeros(2, 8, dtype=torch.int64)
    uses = parameter_uses(model, MicroBatch(ids, ids, 16, 2), as_loss(_language_loss))
    assert uses is not None
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert uses.reached is not None
    assert trained <= uses.reached


def _language_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_saved_weight_is_read_in_pieces():
    weight, sizes = random_weight((1024, 512)), []

    def read(extents: Any) -> Tensor:
        (extent,) = extents
        sizes.append(extent.length)
        return weight.flatten()[extent.start : extent.start + extent.length]

    saved = StateTensor.of(weight)
    saved = StateTensor(saved.dtype, saved.shape, saved.extents, saved.values, read=read)
    layer = adapters_of(net_with(nn.Linear(512, 1024))).quantized["layer"]
    assert torch.equal(quantized_value(saved, layer).values(), packed(weight)[0])
    assert sum(sizes) == weight.numel() == 8 * max(sizes)


def net_with(layer: nn.Module, **keys: Any) -> nn.Module:
    model = nn.Module()
    model.layer, model.head = layer, nn.Linear(64, 64)
    return attach(model, section(**{"targets": ["layer"], **keys}))


def section(**keys: Any) -> LoraConfig:
    return LoraConfig.model_validate({"rank": 2, "quantize": "nf4", **keys})


def test_a_layer_computes_as_torchao_does():
    layer, x = nn.Linear(64, 32), torch.randn(5, 64, requires_grad=True)
    weight, bias = torchao.to_nf4(layer.weight.detach(), 64, 32), layer.bias.detach()
    expected = F.linear(x, weight, bias)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    Nf4Linear.convert(layer.requires_grad_(False), transposed=False, key=KEY)
    result = layer(x)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    (own,) = torch.autograd.grad(result.square().sum(), x)
    torch.testing.assert_close(own, gradient, rtol=1e-6, atol=1e-6)
    assert torch.equal(layer.weight, weight.to(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert "in_features=64, out_features=32" in repr(layer)


class Shared(nn.Module):
    """Two layers have one weight, and one class changes what its weight means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.own, self.plain, self.head = Doubled(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


def test_tied_weights_and_other_classes_stay_as_they_are():
    adapters = adapters_of(attach(Shared(), section(targets=["plain"])))
    assert list(adapters.quantized) == ["plain"]
    assert adapters.unquantized == ("first", "second", "own")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bert", "t5", "vit"])
def test_a_model_of_transformers_runs_with_its_own_reads_of_weights(family):
    """T5 asks a layer for the dtype of its weight; experts of Mixtral are no layers."""
    model = hub_models.make(family)
    before = hub_models.logits_of(model, hub_models.inputs(family))
    plain = sum(parameter.numel() for parameter in model.parameters())
    attach(model, section())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(parameter_elements(model).values()) == plain + trained
    after = hub_models.logits_of(model, hub_models.inputs(family))
    assert 0 < (after - before).norm() < 0.5 * before.norm()


def test_initial_weights_are_those_of_the_model_without_adapters():
    case = lora_runs.EVERY["gpt 4 bits"]
    plain = lora_runs.base_model(lora_runs.Path(), "gpt 4 bits")
    model = lora_runs.begun(lora_runs.Path(), "gpt 4 bits")
    adapters = adapters_of(model)
    assert case.lora is not None
    assert len(adapters.quantized) > 8
    for name in adapters.quantized:
        own = model.get_submodule(f"{name}.base_layer").get_parameter(nf4.CARRIER)
        assert torch.equal(own, packed(plain.get_submodule(name).weight.detach())[0])


def test_a_constructor_that_makes_values_has_them_quantized():
    def make() -> nn.Module:
        torch.rand(1).item()  # draws on the CPU, so nothing can be deferred
        return attach(lora_runs.Plain(), section(targets=["wide"]))

    blueprint = describe(make)
    assert not blueprint.deferred
    model = blueprint.materialize("cpu", seed=3)
    torch.manual_seed(3)
    torch.rand(1)
    plain = lora_runs.Plain()
    layer = model.get_submodule("blocks.1.wide.base_layer")
    assert torch.equal(layer.weight_nf4, packed(plain.blocks[1].wide.weight.detach())[0])


def test_a_forecast_reads_no_value(monkeypatch):
    monkeypatch.setattr(nf4, "quantized", None)
    config = ModelConfig.model_validate(
        {"name": "gpt", "args": {"width": 64, "num_heads": 2}, "lora": {"rank": 2, **QUANTIZE}}
    )
    model = ModelSpec.of(config).describe(num_classes=None, sequence_length=None).model
    carriers = [p for n, p in model.named_parameters() if n.endswith(nf4.CARRIER)]
    assert carriers
    assert all(p.is_meta and p.dtype == torch.uint8 for p in carriers)


QUANTIZE = {"quantize": "nf4"}


def test_a_run_says_which_weights_are_in_4_bits():
    words = ["model.lora.rank=2", KEY, "model.lora.quantize_except=blocks.0.mlp"]
    job = load_job("default", "single", words)
    plan = make_plan(job, 1, "cpu")
    blueprint = ModelSpec.of(job.model).describe(num_classes=None, sequence_length=None)
    _, line, rest = frozen_notes(job, plan, blueprint)
    assert re.fullmatch(
        rf"{KEY}: \S+M weights of \d+ layers in \S+ MiB \(4\.\d\d bits each\) before they are "
        r"sharded or cut; not quantized: blocks\.0\.mlp\.\w+(, blocks\.0\.mlp\.\w+)*",
        line,
    )
    assert rest.startswith("other frozen parameters: ")


@pytest.mark.parametrize(
    ("layer", "keys", "words"),
    [
        (
            nn.Linear(30, 16),
            {},
            r"blocks of 64 elements, and layer.weight has 16 x 30 = 480. Set "
            r"'model.lora.quantize_except=\[layer\]' to leave it as it is\.",
        ),
        (
            nn.Linear(30, 16),
            {"quantize_except": ["layer"]},
            r"no linear layer to quantize besides its head and those that are left out\. Leave "
            r"model\.lora\.quantize out\.",
        ),
        (
            nn.Linear(64, 64),
            {"quantize_except": ["other"]},
            r"except=\[other\]': no module of Module",
        ),
    ],
)
def test_a_weight_that_cannot_be_quantized_is_refused(layer, keys, words):
    with pytest.raises(ConfigError, match=words):
        net_with(layer, **keys)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, r"torchao, which is not installed\. Run: pip install 'bigtrain\[hub\]'"),
        ("0.9.1", r"torchao 0\.18 or later, and 0\.9\.1 is .* pip install 'torchao>=0\.18'"),
    ],
)
def test_a_missing_torchao_is_named(monkeypatch, version, words):
    monkeypatch.setattr(lora, "installed_version", lambda _: version)
    with pytest.raises(ConfigError, match=f"quantize=nf4 needs {words}"):
        net_with(nn.Linear(64, 64))


def test_exceptions_without_a_rule_are_refused():
    words = r"is without effect, as nothing is quantized\. Set model\.lora\.quantize=nf4, or leave"
    with pytest.raises(ConfigError, match=words):
        net_with(nn.Linear(64, 64), quantize=None, quantize_except=["layer"])


def test_a_damaged_record_is_refused(tmp_path):
    record = AdapterRecord.of(adapters_of(net_with(nn.Linear(64, 64))))
    path = tmp_path / "adapters.json"
    path.write_text(record.text())
    assert AdapterRecord.read(tmp_path) == record
    for good, bad in (('"float32"', '"load"'), ("64,", '"x",'), ('"transposed": false', '"t": 0')):
        assert good in record.text()
        path.write_text(record.text().replace(good, bad))
        with pytest.raises(ConfigError, match=r"adapters\.json is not readable"):
            AdapterRecord.read(tmp_path)


@pytest.mark.parametrize(
    "strategy", ["tensor", "oss", "sharded_ddp", "parameter_server", "pipeline_deepspeed", "zero3"]
)
def test_a_strategy_that_cannot_hold_weights_in_4_bits_says_so(strategy):
    axes = {"tensor": {"mesh.tp": 2}, "pipeline_deepspeed": {"mesh.pp": 2}}.get(strategy, {})
    keys = {"train.global_batch_size": 4, "train.micro_batch_size": 1, "device": "cpu"}
    job = job_from_keys(strategy, {**keys, **axes})
    plan, loss = make_plan(job, 2, "cpu"), as_loss(lora_runs.rows_loss)
    model = lora_runs.described(lora_runs.Path(), "gpt 4 bits").model
    batch = lora_runs.batch(0)
    example = example_batch((batch[0][:1], batch[1][:1]), loss, job, plan)
    words = (
        r"blocks\.0\.attention\.qkv\.base_layer\.weight_nf4 is in 4 bits "
        rf"\(model\.lora\.quantize=nf4\), which strategy {strategy} does not support\. Leave "
        r"model\.lora\.quantize out, or use --strategy fsdp\."
    )
    with pytest.raises(ConfigError, match=words):
        resolve_plan(plan, Workload(model, example, loss, lora_runs.sgd))


@pytest.mark.parametrize(("names", "word"), [(["x"], "with"), (["x.weight_nf4"], "without")])
def test_a_checkpoint_of_another_quantization_is_refused_with_the_key(names, word):
    saved = {"model.x": torch.zeros(1), "model.x.weight_nf4": torch.zeros(1)}
    saved = {name: one for name, one in saved.items() if name.removeprefix("model.") not in names}
    words = rf"saved with\. It was saved {word} model\.lora\.quantize=nf4\."
    with pytest.raises(CheckpointError, match=words):
        check_shapes({}, set(names), saved)
