"""Programs that people train, adapt, shrink and export models with, on exported directories of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.outside.models import CLIENTS, build, exported
from tests.tiny import TEXT

IDS = torch.randint(3, 384, (2, 11), generator=torch.Generator().manual_seed(0))
GENTLE = {"initializer_range": 0.05}
"""A start from which a few steps of training go downhill."""


@pytest.fixture(scope="module", params=CLIENTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(request.param, tmp_path_factory.mktemp("export"), **GENTLE)


def opened(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def common_settings(tmp_path: Path, steps: int) -> dict[str, Any]:
    return dict(
        output_dir=str(tmp_path / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=True,
        disable_tqdm=True,
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trl_sft(directory: Path, tmp_path: Path) -> None:
    """Supervised fine-tuning learns two texts, starts from the model's own loss, and what it saves is what it has."""
    texts = Dataset.from_list([{"text": text} for text in TEXT[:2]])
    arguments = SFTConfig(**common_settings(tmp_path, 12), max_length=64, shuffle_dataset=False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    trainer = SFTTrainer(opened(directory), args=arguments, train_dataset=texts, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    own = model(**{k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "labels")}).loss.item()
    trainer.train()
    found = losses(trainer)
    assert found[0] == pytest.approx(own, rel=1e-3)
    assert found[-1] < found[0] / 2
    trainer.save_model(tmp_path / "tuned")
    torch.testing.assert_close(logits(opened(tmp_path / "tuned")), logits(trainer.model), rtol=0, atol=1e-5)


def test_trl_dpo(directory: Path, tmp_path: Path) -> None:
    """Preference training takes the reference model from the same place and comes to prefer what is preferred."""
    pairs = [{"prompt": text[:20], "chosen": text[20:40], "rejected": text[40:60]} for text in TEXT[:2]]
    arguments = DPOConfig(**{**common_settings(tmp_path, 6), "learning_rate": 1e-3}, max_length=64)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    trainer = DPOTrainer(
        opened(directory), args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer
    )
    trainer.train()
    found = losses(trainer)
    assert found[0] == pytest.approx(0.6931, abs=1e-3), "at the start policy and reference are one: log 2"
    assert found[-1] < found[0] / 2
    assert [e["rewards/accuracies"] for e in trainer.state.log_history if "loss" in e][-1] == 1.0


def test_peft_lora(directory: Path, tmp_path: Path) -> None:
    """Every adapter gets a gradient; saved and reopened, merged and disabled it is what it should be."""
    base = logits(opened(directory))
    settings = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(opened(directory), settings)
    model.train()(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lora_" in n)
    adapted = logits(model)
    assert (adapted - base).abs().max() > 1e-2
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), base, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(opened(directory), tmp_path / "adapter")), adapted, rtol=0, atol=1e-6
    )
    reopened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    torch.testing.assert_close(logits(reopened), adapted, rtol=0, atol=1e-6)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-3)


def test_torchao_int8(directory: Path, tmp_path: Path) -> None:
    """Weights in int8 answer as the same weights in float32 would, and come back exactly."""
    settings = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    quantized = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, quantization_config=settings)
    answers, rounded = logits(quantized), opened(directory)
    with torch.no_grad():
        for name, module in quantized.named_modules():
            if type(getattr(module, "weight", None)).__name__ == "Int8Tensor":
                rounded.get_submodule(name).weight.copy_(module.weight.dequantize())
            else:
                assert not name.endswith("_proj"), "every projection is quantised"
    torch.testing.assert_close(answers, logits(rounded), rtol=0, atol=1e-4)
    assert (answers - logits(opened(directory))).abs().max() > 1e-2, "rounding is seen"
    quantized.save_pretrained(tmp_path / "int8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.float32)
    torch.testing.assert_close(logits(again), answers, rtol=0, atol=0)


@pytest.mark.parametrize("name", CLIENTS)
def test_torch_export(name: str) -> None:
    """One graph for any length."""
    model = build(name).requires_grad_(False)
    length = torch.export.Dim("length", min=2, max=128)
    program = torch.export.export(
        model,
        (IDS,),
        {"use_cache": False},
        dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
        strict=False,
    ).module()
    for count in (9, 17):
        ids = torch.randint(3, 384, (2, count))
        torch.testing.assert_close(
            program(ids, use_cache=False).logits, model(ids, use_cache=False).logits, rtol=0, atol=1e-5
        )
