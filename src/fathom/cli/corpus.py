"""`fathom corpus RECIPE.yaml [key=value ...]`.

`corpus/pipeline.py` builds the corpus. It needs neither torch nor transformers: where transformers is missing,
`data/plain_tokenizer.py` reads the tokenizer.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.cli.parser import Parser, add_keys
from fathom.corpus.recipe import CorpusRecipe, load_corpus_recipe
from fathom.recipe import find_recipe
from fathom.report.results import to_json
from fathom.settings import describe

UPLOAD = "copy the result to this URL with fsspec, such as s3://BUCKET/DIR or gs://BUCKET/DIR"
EXAMPLES = (
    "fathom corpus geology.yaml --dry-run",
    "fathom corpus geology.yaml --out corpora/geology",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("recipe", type=Path, help="a YAML file, or a name that `fathom recipes` lists")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values of the recipe file")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="output directory (default: corpora/NAME, after the recipe's name)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of worker processes; short for executor.workers=N"
    )
    parser.add_argument("--upload", metavar="URL", help=UPLOAD)
    parser.add_argument(
        "--dry-run", action="store_true", help="print inputs, stages and token budget, and stop before any work"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    add_keys(parser, lambda: describe(CorpusRecipe))


def run(options: Namespace) -> int:
    """Build the corpus, or with `--dry-run` print the plan."""
    from fathom.corpus.pipeline import build, preview
    from fathom.corpus.stage import STAGES
    from fathom.data.cloud import check_upload, upload

    words = [*options.overrides, *([f"executor.workers={options.workers}"] if options.workers is not None else [])]
    recipe = load_corpus_recipe(find_recipe(options.recipe), words)
    directory = options.out or Path("corpora") / options.recipe.stem
    if options.upload:
        check_upload(options.upload)
    if options.dry_run:
        found = preview(recipe, directory)
        print(to_json(found) if options.json else found)
        return int(found.budget.infeasible is not None)
    report = build(recipe, directory)
    if options.upload:
        upload(directory, options.upload, (STAGES,))
    print(to_json(report) if options.json else report)
    return 0
