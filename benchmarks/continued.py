"""Continued pretraining as the pondering papers do it, small: a Pythia with AdaPonder, a Llama with latent CoT.

    python benchmarks/continued.py TEXT.jsonl... --work DIR --out FILE.json

A base of each shape is trained on the text and exported as transformers' own class, which is opened again. The Pythia
then learns to ponder, its gates are trained alone, and at last everything (AdaPonderLM); the Llama goes straight to
`latent_cot`. Beside each is a control, the base trained on as many further tokens. A run that was stopped resumes, and
the log is written after every run. One seed and a million parameters: it shows that the path works, not what
it is worth.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fathom.checkpoints.export import export
from fathom.checkpoints.open import load
from fathom.cli.main import main as fathom
from fathom.recipe import load_recipe
from fathom.report.files import write_json
from fathom.report.provenance import provenance
from fathom.training import train

RECIPES = Path(__file__).parents[1] / "recipes"
VOCABULARY = 2048
COMMON = ["data.sequence_length=128", "train.tokens_per_step=2048", "train.micro_batch=8", "evaluate.every=0"]
COMMON += ["evaluate.tokens=65536", "train.checkpoint_every=50", "train.keep_last=1"]
SHAPE = [f"model.vocab_size={VOCABULARY}", "model.tie_word_embeddings=false", "model.num_key_value_heads=4"]
PYTHIA = ["norm=layer", "qk_norm=none", "parallel_residual=true", "gated_mlp=false", "hidden_act=gelu"]
PYTHIA += [
    "attention_bias=true",
    "mlp_bias=true",
    "intermediate_size=512",
    "rope_parameters.partial_rotary_factor=0.25",
]
LLAMA = ["qk_norm=none"]
FAMILIES = {"pythia": [f"model.{key}" for key in PYTHIA], "llama": [f"model.{key}" for key in LLAMA]}

STAGES: dict[str, tuple[str, str, list[str]]] = {
    # name: its family, the run that it continues, what is new in its model
    "pythia-control": ("pythia", "pythia", []),
    "pythia-ponder": ("pythia", "pythia", ["recurrence=ponder", "recurrence_options.trips=4"]),
    "pythia-gates": ("pythia", "pythia-ponder", ["recurrence=adaponder", "recurrence_options.trips=4"]),
    "pythia-adaponder": ("pythia", "pythia-gates", []),
    "llama-control": ("llama", "llama", []),
    "llama-latent_cot": ("llama", "llama", ["recurrence=latent_cot", "recurrence_options.trips=4"]),
}
GATES = ["optim.only=[model.recurrence]"]
TOKENS = {"pythia-ponder": 0.5, "pythia-gates": 0.1, "pythia-adaponder": 0.4}
"""Shares of the further tokens; elsewhere all of them."""


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600, help="of a base, and of what follows it")
    given = parser.parse_args()
    data = given.work / "data"
    fathom(["prepare", *given.text, "--train-tokenizer", str(VOCABULARY), "--held-out", "0.05", "--out", str(data)])
    log: dict[str, Any] = {"provenance": asdict(provenance()), "steps": given.steps, "runs": {}}
    common = [f"data.directory={data}", *COMMON]
    for family, shape in FAMILIES.items():
        words = [*common, *SHAPE, *shape, f"train.steps={given.steps}"]
        log["runs"][family] = run("tiny", words, given.work / family)
        write_json(given.out, log)
        native = given.work / f"{family}-native"
        if not native.exists():
            model, tokenizer = load(given.work / family)
            export(model, native, tokenizer, form="native")
    for name, (family, before, changed) in STAGES.items():
        origin = given.work / (f"{family}-native" if before == family else f"{before}/model")
        steps = round(given.steps * TOKENS.get(name, 1))
        words = [*common, "model=null", f"model.from_pretrained={origin}", *(f"model.{key}" for key in changed)]
        words += [f"train.steps={steps}", "optim.name=adamw", "optim.lr=1e-3", *(GATES if "gates" in name else [])]
        log["runs"][name] = run("tiny", words, given.work / name)
        write_json(given.out, log)


def run(recipe: str, words: list[str], directory: Path) -> dict[str, Any]:
    """Train, or read what was trained."""
    result = train(load_recipe(RECIPES / f"{recipe}.yaml", words), directory)
    return asdict(result)


if __name__ == "__main__":
    main()
