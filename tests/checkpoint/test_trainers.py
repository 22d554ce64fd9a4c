"""Files of other trainers: recognized by content, the model by its key, the optimizer by names."""

from __future__ import annotations

import argparse
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigtrain.checkpoint.command import main
from bigtrain.checkpoint.foreign.convert import open_source
from bigtrain.errors import CheckpointError, ConfigError


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        OrderedDict(up=nn.Linear(3, 4), norm=nn.BatchNorm1d(4), out=nn.Linear(4, 4))
    )


def values(source: Any, part: str = "model") -> dict[str, torch.Tensor]:
    """The values of a source's part, by name."""
    state = getattr(source, part)
    return {name: tensor.values().reshape(tensor.shape) for name, tensor in state.items()}


def assert_same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(actual[name], value), name


NAMES = [
    "a.pth.tar",
    "a.tar",
    "a.checkpoint",
    "model_best",
    "a.pyth",
    "weights.model",
    "a.safetensors",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_known_by_its_content(name, tmp_path):
    weights = net().state_dict()
    torch.save(weights, tmp_path / "plain.pt")
    save_file(weights, tmp_path / "plain.safetensors")
    for made in ("plain.pt", "plain.safetensors"):
        (tmp_path / name).unlink(missing_ok=True)
        shutil.copy(tmp_path / made, tmp_path / name)
        assert_same(values(open_source(tmp_path / name)), weights)


def test_what_is_no_checkpoint_is_refused_whatever_its_name(tmp_path):
    for name, content in (
        ("a.txt", b"words"),
        ("b", b""),
        ("c.tar", b"words"),
        ("d", b"\x80\x04K"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((ConfigError, CheckpointError), match=f"{name}"):
            open_source(tmp_path / name)
    torch.save(net().state_dict(), tmp_path / "old", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"in the format of torch.save since torch 1.6"):
        open_source(tmp_path / "old")
    torch.save(net().state_dict(), tmp_path / "whole.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:-99])
    with pytest.raises(CheckpointError, match=r"cut.pth begins like .*, but its end is missing"):
        open_source(tmp_path / "cut.pth")
    (tmp_path / "words.pth").write_bytes(b"words")
    with pytest.raises(CheckpointError, match=r"words.pth is not a file of torch.save, by its"):
        open_source(tmp_path / "words.pth")
    save_file(net().state_dict(), tmp_path / "w.tar")
    with pytest.raises(ConfigError, match=r"--key ema: .*w.tar is a safetensors file, which"):
        open_source(tmp_path / "w.tar", key="ema")


def weights_times(factor: float) -> dict[str, torch.Tensor]:
    return {name: value * factor for name, value in net().state_dict().items()}


def test_the_model_is_chosen_by_its_key(tmp_path):
    file = tmp_path / "gan.pth"
    nets = {"generator": weights_times(1), "discriminator": weights_times(2), "step": 7}
    torch.save({"nets": nets, "params_ema": weights_times(3), "a.b": weights_times(4)}, file)
    with pytest.raises(CheckpointError) as error:
        open_source(file)
    assert "more than one model: 'nets' (18 tensors), 'params_ema' (9 tensors), 'a.b' (9" in str(
        error.value
    )
    assert "Choose one: --key nets" in str(error.value)
    with pytest.raises(
        CheckpointError, match=r"'discriminator' \(9 tensors\). Choose one: --key n"
    ):
        open_source(file, key="nets")
    for key, factor in (
        ("nets.generator", 1),
        ("nets.discriminator", 2),
        ("params_ema", 3),
        ("a.b", 4),
    ):
        source = open_source(file, key=key)
        assert_same(values(source), weights_times(factor))
        assert any("Left out: " in note for note in source.notes)
    for key, message in (
        (
            "net",
            r"there is no 'net' in .*, did you mean 'nets'\? Dicts there: 'nets', 'params_ema'",
        ),
        ("nets.ema", r"there is no 'ema' in .* Dicts there: 'generator', 'discriminator'"),
        ("nets.step", r"'step' is not a dict"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(file, key=key)
    (tmp_path / ".metadata").touch()
    with pytest.raises(ConfigError, match=r"--key ema chooses in a file of torch.save, and"):
        open_source(tmp_path, key="ema")


@pytest.mark.parametrize("key", ["net", "params", "generator", "ema", "backbone"])
def test_the_only_model_is_found_under_any_key(key, tmp_path):
    optimizer = torch.optim.Adam(net().parameters()).state_dict()
    # A lone tensor in the file, such as an epoch number, is not mistaken for a model.
    for number in (1, torch.ones(1)):
        torch.save({key: net().state_dict(), "optim": optimizer, "n": number}, tmp_path / "w")
        assert_same(values(open_source(tmp_path / "w")), net().state_dict())
        assert_same(values(open_source(tmp_path / "w", key=key)), net().state_dict())
    # A module's extra state that is not a tensor does not make the file a trainer's.
    extra = {"fp8": {"scale": torch.ones(1)}}
    torch.save({**net().state_dict(), "up._extra_state": extra}, tmp_path / "w")
    source = open_source(tmp_path / "w")
    assert_same(values(source), net().state_dict())
    assert source.notes == ("Left out: up._extra_state.",)


def test_a_model_beside_a_tensor_is_found(tmp_path):
    torch.save({"epoch": torch.tensor(3), "state_dict": net().state_dict()}, tmp_path / "w.pt")
    source = open_source(tmp_path / "w.pt")
    assert_same(values(source), net().state_dict())
    assert source.notes == ("Left out: epoch.",)
    torch.save({"model": net().state_dict(), "weights": weights_times(2)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'model' \(9 tensors\), 'weights' \(9 tensors\)"):
        open_source(tmp_path / "w.pt")


def test_where_no_model_is_the_keys_are_listed(tmp_path):
    torch.save({"epoch": 1, "args": {"lr": 0.1}, "log": [1, 2]}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as error:
        open_source(tmp_path / "w.pt")
    assert "has no named tensors of a model. It has 'epoch' (int), 'args' (dict), 'log' (" in (
        str(error.value)
    )


def test_prefixes_are_taken_away(tmp_path, capsys):
    file = tmp_path / "moco.pth.tar"
    weights = net().state_dict()
    queries = {f"module.encoder_q.{name}": value for name, value in weights.items()}
    keys = {f"module.encoder_k.{name}": value * 2 for name, value in weights.items()}
    torch.save({"epoch": 1, "state_dict": {**queries, **keys, "module.queue": torch.ones(2)}}, file)
    for prefix in ("module.encoder_q.", "encoder_q."):
        source = open_source(file, strip=prefix)
        assert_same(values(source), weights)
        assert "Left out: 10 tensors whose names do not begin with encoder_q." in source.notes
    with pytest.raises(
        ConfigError, match=r"--strip q.: no name .* begin with encoder_k., encoder_q., q"
    ):
        open_source(file, strip="q.")
    words = ["convert", str(file), str(tmp_path / "run"), "--strip", "encoder_k."]
    assert main(words) == 0
    assert "9 tensors of the model, 0 of the optimizer" in capsys.readouterr().out
    words = ["convert", str(file), str(tmp_path / "other"), "--key", "state_dict"]
    assert main(words) == 0
    assert "19 tensors of the model" in capsys.readouterr().out


def lightning_file(prefix: str) -> dict[str, Any]:
    """A file like Lightning's, with names below `prefix`."""
    state = {f"{prefix}{name}": value for name, value in net().state_dict().items()}
    return {"state_dict": state, "pytorch-lightning_version": "2.1", "global_step": 5}


def test_the_attribute_of_lightning_is_taken_away_where_it_is_the_only_one(tmp_path):
    file = tmp_path / "last.ckpt"
    for prefix in ("model.", "net.", "module.model."):
        torch.save(lightning_file(prefix), file)
        source = open_source(file)
        assert_same(values(source), net().state_dict())
        assert source.step == 5
        unstripped = open_source(file, strip="")
        plain = prefix.removeprefix("module.")
        assert {name.removeprefix(plain) for name in unstripped.model} == {*net().state_dict()}
        assert all(name.startswith(plain) for name in unstripped.model)
    # Without Lightning's other keys
    torch.save({"state_dict": lightning_file("model.")["state_dict"]}, file)
    assert all(name.startswith("model.") for name in open_source(file).model)
    two = lightning_file("model.")
    two["state_dict"]["loss.weight"] = torch.ones(2)
    torch.save(two, file)
    assert "model.up.weight" in open_source(file).model
    assert_same(values(open_source(file, strip="model.")), net().state_dict())


def trained_model(named: bool, groups: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a few steps, with parameters by name or in groups."""
    model = net()
    parameters: Any = list(model.named_parameters() if named else model.parameters())
    parameter_groups = [{"params": parameters[n::groups]} for n in range(groups)]
    optimizer = torch.optim.AdamW(parameter_groups if groups > 1 else parameters)
    for _ in range(2):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(1))).sum().backward()
        optimizer.step()
    return model, optimizer


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The moments of the optimizer as (parameter name).(slot)."""
    return {
        f"{name}.{slot}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }


@pytest.mark.parametrize(("named", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_moments_come_over_where_their_parameters_are_known(named, groups, tmp_path):
    model, optimizer = trained_model(named, groups)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "w.pt")
    source = open_source(tmp_path / "w.pt")
    assert_same(values(source, "optimizer"), moments_of(model, optimizer))
    assert source.step == 2
    assert any("they were matched to" in note for note in source.notes) is not named


def state_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = ""
) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters, below `prefix`."""
    return {f"{prefix}{n}": dict(optimizer.state[p]) for n, p in model.named_parameters()}


def test_moments_under_names_come_over(tmp_path):
    model, optimizer = trained_model(False)
    nested = state_by_name(model, optimizer, "_fsdp_wrapped_module.")
    flat = {
        f"state.{name}.{slot}": value
        for name, slots in state_by_name(model, optimizer).items()
        for slot, value in slots.items()
    }
    for key, state in (
        ("optim", {"state": nested, "param_groups": [{"params": [*nested]}]}),
        ("optimizer_state_dict", {**flat, "param_groups.up.weight.lr": 0.1}),
        (
            "optimizer",
            {"state": {n: {**s, "step": 2} for n, s in nested.items()}, "param_groups": []},
        ),
    ):
        torch.save({"net": model.state_dict(), key: state}, tmp_path / "w.pt")
        source = open_source(tmp_path / "w.pt")
        assert_same(values(source, "optimizer"), moments_of(model, optimizer))
        assert (source.step, source.notes) == (2, ())


def test_moments_that_cannot_be_told_apart_are_left_out_by_name(tmp_path):
    def note(state: dict[str, Any], weights: dict[str, Any] | None = None) -> str:
        model = weights or net().state_dict()
        torch.save({"model": model, "optimizer": state}, tmp_path / "w.pt")
        source = open_source(tmp_path / "w.pt")
        assert not source.optimizer
        assert source.step is None
        return " ".join(source.notes)

    _, optimizer = trained_model(False, 2)
    assert "was left out: its 2 groups have numbers instead of names." in note(
        optimizer.state_dict()
    )
    model, optimizer = trained_model(False)
    more = {**net().state_dict(), "frozen": torch.ones(2)}
    assert "it has 6 parameters by number, and the model has 7 tensors" in note(
        optimizer.state_dict(), more
    )
    reordered = torch.optim.AdamW(reversed(list(model.parameters())))
    reordered.step()
    assert "its exp_avg of parameter 0 has the shape [4], and up.weight has [4, 3]" in note(
        reordered.state_dict()
    )
    strange = {f"x.{name}": value for name, value in state_by_name(model, optimizer).items()}
    assert "it has 'x.up.weight', which the model does not have" in note(
        {"state": strange, "param_groups": []}
    )
    assert note({"state": {}, "param_groups": []}) == "Left out: optimizer."


def test_an_optimizer_is_that_of_the_model_that_was_found_and_not_of_a_chosen_one(tmp_path):
    model, optimizer = trained_model(True)
    state = {"model": model.state_dict(), "ema": weights_times(2)}
    torch.save({**state, "optimizer": optimizer.state_dict()}, tmp_path / "w.pt")
    assert open_source(tmp_path / "w.pt").optimizer
    assert not open_source(tmp_path / "w.pt", key="ema").optimizer


def test_momentum_that_is_not_there_yet_is_not_taken(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = None
    torch.save({"model": model.state_dict(), "optimizer": state, "iteration": 4}, tmp_path / "w.pt")
    source = open_source(tmp_path / "w.pt")
    assert source.step == 4
    assert len(source.optimizer) == 5
    assert "up.weight.momentum_buffer" not in source.optimizer


def test_numbers_of_numpy_beside_the_model_are_left_out(tmp_path):
    """A best accuracy, a curve and the script's arguments."""
    state = {"state_dict": net().state_dict(), "best": np.float64(3.5), "curve": np.arange(3)}
    torch.save({**state, "args": argparse.Namespace(lr=0.1)}, tmp_path / "last.pth.tar")
    source = open_source(tmp_path / "last.pth.tar")
    assert_same(values(source), net().state_dict())
    assert source.notes == ("Left out: args, best, curve.",)


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="is not a supported checkpoint"):
        open_source(tmp_path / "w.pt")
