"""PEFT's LN-tuning folders are read and written as PEFT itself reads and writes them."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

from onlynorm.errors import ConversionError, FormatError, MissingDataError
from onlynorm.tuning import apply_adapter, only_norms, read_peft, take_adapter, write_peft

peft = pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")


def make() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = BertConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
        )
        return BertForSequenceClassification(small).eval()


TOKENS = torch.arange(24).reshape(2, 12)


def shake(parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in parameters:
            p += 0.1 * torch.randn(p.shape, generator=generator)


@pytest.fixture(autouse=True)
def peft_warns_of_layers_it_copies() -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        yield


def test_what_peft_saved_is_read_exactly(tmp_path: Path) -> None:
    config = peft.LNTuningConfig(target_modules=["LayerNorm"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    theirs = peft.get_peft_model(make(), config)
    shake([p for p in theirs.parameters() if p.requires_grad])
    theirs.save_pretrained(tmp_path)
    ours = make()
    adapter = read_peft(ours, tmp_path)
    apply_adapter(ours, adapter)
    assert set(adapter.heads) == {"classifier.bias", "classifier.weight"}
    assert torch.equal(ours(TOKENS).logits, theirs.eval()(TOKENS).logits)


def test_what_we_wrote_peft_loads_exactly(tmp_path: Path) -> None:
    ours = make()
    handle = only_norms(ours, also="classifier")
    shake(handle.parameters())
    write_peft(take_adapter(ours), tmp_path, task_type="SEQ_CLS")
    theirs = peft.PeftModel.from_pretrained(make(), tmp_path)
    assert torch.equal(theirs.eval()(TOKENS).logits, ours(TOKENS).logits)


def test_a_round_trip_gives_the_same_tensors(tmp_path: Path) -> None:
    ours = make()
    shake(only_norms(ours, also="classifier").parameters())
    adapter = take_adapter(ours)
    write_peft(adapter, tmp_path)
    again = read_peft(copy.deepcopy(ours), tmp_path)
    assert again.tensors.keys() == adapter.tensors.keys()
    assert all(torch.equal(again.tensors[k], adapter.tensors[k]) for k in adapter.tensors)
    assert (set(again.heads), again.base) == (set(adapter.heads), adapter.base)


def test_batch_norms_go_along_with_their_statistics(tmp_path: Path) -> None:
    def make_images() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())

    ours, images = make_images(), torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    shake(only_norms(ours).parameters())
    ours.train()(images)
    write_peft(take_adapter(ours), tmp_path)
    theirs = peft.PeftModel.from_pretrained(make_images(), tmp_path)
    assert torch.equal(theirs.eval()(images), ours.eval()(images))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(MissingDataError, match=r"needs adapter_config\.json"):
        read_peft(model, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text("[]")
    with pytest.raises(FormatError, match="JSON object"):
        read_peft(model, tmp_path)
    config.write_text("{")
    with pytest.raises(FormatError, match="needs to be JSON"):
        read_peft(model, tmp_path)
    config.write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ConversionError, match=r"LN-tuning folder.*'LORA'"):
        read_peft(model, tmp_path)
    config.write_text(json.dumps({"peft_type": "LN_TUNING"}))
    with pytest.raises(MissingDataError, match=r"\.bin"):
        read_peft(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345678")
    with pytest.raises(FormatError, match="safetensors file"):
        read_peft(model, tmp_path)
    with pytest.raises(ConversionError, match="norm as the whole model"):
        write_peft(take_adapter(nn.LayerNorm(3)), tmp_path)
