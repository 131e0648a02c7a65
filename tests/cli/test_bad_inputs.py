"""Every command on bad inputs: one line that names the culprit, exit 2, and not a byte elsewhere changed.

A case is a command line, run among the things of `bad_things.py`, and what its one line must mention.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fathom.cli.main import COMMANDS, main
from tests.cli.bad_things import make

PREPARE = [
    ("", "INPUT"),
    ("nowhere.jsonl", "nowhere.jsonl"),
    ("god.jsonl", "god.jsonl"),
    ("'nowhere*.jsonl'", "nowhere*.jsonl"),
    ("''", "INPUT"),
    ("folder", "folder"),
    ("empty.jsonl", "empty.jsonl"),
    ("empty.txt", "empty.txt"),
    ("broken.jsonl", "broken.jsonl"),
    ("list.jsonl", "list.jsonl"),
    ("number.jsonl", "number.jsonl"),
    ("null.jsonl", "null.jsonl"),
    ("other.jsonl", "other.jsonl"),
    ("word.jsonl", "word.jsonl"),
    ("deep.jsonl", "deep.jsonl"),
    ("latin.jsonl", "latin.jsonl"),
    ("latin.txt", "latin.txt"),
    ("utf16.txt", "utf16.txt"),
    ("zeros.jsonl", "zeros.jsonl"),
    ("surrogate.jsonl", "surrogate.jsonl"),
    ("domain.jsonl --domain-field domain", "domain.jsonl"),
    ("good.jsonl --domain-field domain", "domain"),
    ("long.jsonl", "long.jsonl"),
    ("plain.gz", "plain.gz"),
    ("plain.jsonl.gz", "plain.jsonl.gz"),
    ("cut.jsonl.gz", "cut.jsonl.gz"),
    ("bomb.jsonl.gz", "bomb.jsonl.gz"),
    ("plain.jsonl.bz2", "plain.jsonl.bz2"),
    ("cut.jsonl.bz2", "cut.jsonl.bz2"),
    ("plain.jsonl.xz", "plain.jsonl.xz"),
    ("cut.jsonl.xz", "cut.jsonl.xz"),
    ("plain.jsonl.zst", "plain.jsonl.zst"),
    ("packed.jsonl --undecodable replace", "packed.jsonl contains gzip data", "packed.jsonl.gz"),
    ("packed.txt --undecodable skip", "packed.txt contains xz data", "packed.txt.xz"),
    ("plain.parquet", "plain.parquet"),
    ("empty.parquet", "empty.parquet"),
    ("plain.arrow", "plain.arrow"),
    ("good.pdf", "good.pdf"),
    ("dangling.jsonl", "dangling.jsonl"),
    ("pipe.jsonl", "pipe.jsonl"),
    ("hf:", "hf:"),
    ("hf:one/two/three", "hf:one/two/three"),
    ("../../=good.jsonl", "../../"),
    ("a/b=good.jsonl", "a/b"),
    ("=good.jsonl", "=good.jsonl"),
    ("good.jsonl --text-field body", "body"),
    ("good.jsonl --text-field ''", "text-field"),
    ("good.txt --text-field body", "text-field body: all inputs are text files"),
    ("good.txt --domain-field domain", "domain-field domain: all inputs are text files"),
    ("good.jsonl --file-format xls", "--file-format xls"),
    ("good.jsonl --undecodable ignore", "--undecodable ignore"),
    ("good.jsonl --oversize maybe", "--oversize maybe"),
    ("good.jsonl --max-record-bytes 1", "--max-record-bytes"),
    ("good.jsonl --held-out 1", "--held-out"),
    ("good.jsonl --held-out -0.1", "--held-out"),
    ("good.jsonl --held-out .nan", "--held-out"),
    ("good.jsonl --shard-tokens 0", "--shard-tokens"),
    ("good.jsonl --shard-tokens 1.5", "--shard-tokens 1.5"),
    ("good.jsonl --workers 0", "--workers"),
    ("good.jsonl --workers many", "--workers many"),
    ("good.jsonl --eos-token nope", "nope"),
    ("good.jsonl --eos-token ''", "''"),
    ("good.jsonl --tokeniser words", "--tokeniser"),
    ("good.jsonl --overwrite=yes", "--overwrite"),
    ("good.jsonl --train-tokenizer 300", "--train-tokenizer"),
]
PREPARE_WITH = [
    ("", "--tokenizer"),
    ("--train-tokenizer 10", "--train-tokenizer"),
    ("--train-tokenizer -1", "--train-tokenizer"),
    ("--train-tokenizer big", "--train-tokenizer big"),
    ("--train-tokenizer 300 --tokenizer-bytes -1", "--tokenizer-bytes"),
    ("--tokenizer word", "word"),
    ("--tokenizer ./words/nowhere.json", "nowhere.json"),
    ("--tokenizer ''", "--tokenizer"),
    ("--tokenizer folder", "folder"),
    ("--tokenizer file", "file"),
    ("--tokenizer cut.json", "cut.json"),
    ("--tokenizer empty.json", "empty.json"),
    ("--tokenizer pickled.json", "pickled.json"),
    ("--tokenizer noise.model", "noise.model"),
    ("--tokenizer empty.model", "empty.model"),
    ("--tokenizer words_cut", "words_cut"),
    ("--tokenizer words_settings", "words_settings"),
    ("--tokenizer dangling.jsonl", "dangling.jsonl"),
]
PREPARE_OUT = [
    ("file", "file"),
    ("file/below", "file"),
    ("''", "--out"),
    ("full", "full"),
    ("corpus/out", "corpus/out"),
    ("corpus_index", "corpus_index"),
    ("corpus_other", "corpus_other"),
    ("corpus_version", "corpus_version"),
    ("words", "words"),
    ("run", "run"),
    ("/proc/fathom", "/proc/fathom"),
    ("good.jsonl/../out", "good.jsonl"),
]
TRAIN = [
    ("", "the following arguments are required: recipe"),
    ("nowhere.yaml", "nowhere.yaml"),
    ("tinny", "did you mean tiny"),
    ("''", "recipe"),
    ("folder", "folder"),
    ("file", "file"),
    *((name, name) for name in ("empty.yaml", "list.yaml", "text.yaml", "broken.yaml", "tabs.yaml")),
    ("binary.yaml", "binary.yaml: not a text file"),
    *((name, name) for name in ("zeros.yaml", "unsafe.yaml", "circle.yaml", "baseless.yaml", "basefolder.yaml")),
    ("basenumber.yaml", "basenumber.yaml"),
    ("keyless.yaml", "5: unknown key"),
    ("section.yaml", "optim=5"),
    ("inner.yaml", "optim.5: unknown key"),
    ("model.yaml", "model=[1]"),
    ("modelkey.yaml", "model={5: 6}"),
    ("deep.yaml", "deep.yaml"),
    ("aliases.yaml", "a: unknown key"),
    ("good.yaml --wrong", "unrecognized arguments: --wrong"),
    ("--wrong", "--wrong"),
    ("good.yaml optim", "optim"),
    ("good.yaml =5", "=5"),
    ("good.yaml optim.lr", "optim.lr"),
    ("good.yaml optim.lrr=1", "did you mean optim.lr"),
    ("good.yaml optim.lr=fast", "optim.lr=fast: allowed: a number"),
    ("good.yaml optim.lr=-1", "optim.lr=-1"),
    ("good.yaml optim.lr=.nan", "optim.lr=nan"),
    ("good.yaml optim.lr=[1", "optim.lr"),
    ("good.yaml optim.lr.x=1", "optim.lr"),
    ("good.yaml optim=5", "optim=5"),
    ("good.yaml optim.weight_decay=.inf", "optim.weight_decay=inf"),
    ("good.yaml optim.weight_decay=-1", "optim.weight_decay=-1"),
    ("good.yaml optim.clip=0", "optim.clip=0"),
    ("good.yaml optim.eps=.inf", "optim.eps=inf"),
    ("good.yaml optim.betas=[0.9,1]", "optim.betas"),
    ("good.yaml optim.floor=2", "optim.floor=2"),
    ("good.yaml optim.warmup_steps=-1", "optim.warmup_steps=-1"),
    ("good.yaml optim.schedule=wsd optim.decay=0.99", "optim.decay=0.99"),
    ("good.yaml optim.only=[nope]", "optim.only=nope"),
    ("good.yaml train.steps=0", "train.steps=0"),
    ("good.yaml train.steps=1e3", "train.steps=1000.0"),
    ("good.yaml train.seed=-1", "train.seed=-1"),
    ("good.yaml train.tokens_per_step=100", "train.tokens_per_step=100"),
    ("good.yaml train.micro_batch=3", "train.micro_batch=3"),
    ("good.yaml train.precision=fp8", "train.precision=fp8"),
    ("good.yaml train.device=tpu", "train.device=tpu"),
    ("good.yaml train.skip_spikes=.nan", "train.skip_spikes=nan"),
    ("good.yaml parallel.shard_size=0", "parallel.shard_size=0"),
    ("good.yaml evaluate.every=-1", "evaluate.every=-1"),
    ("good.yaml evaluate.micro_batch=0", "evaluate.micro_batch=0"),
    ("good.yaml evaluate.position_buckets=0", "evaluate.position_buckets=0"),
    ("good.yaml track.backends=[abacus]", "track.backends"),
    ("good.yaml track.backends=[wandb]", "wandb"),
    ("good.yaml track.peak_flops=-1", "track.peak_flops=-1"),
    ("good.yaml kvcache.method=nope", "kvcache.method=nope"),
    ("good.yaml kvcache.method=freqkv", "kvcache.window"),
    ("good.yaml kvcache.method=freqkv kvcache.window=16 kvcache.ratio=.nan", "kvcache.ratio=nan"),
    ("good.yaml kvcache.window=16", "kvcache.window=16"),
    ("good.yaml data.sequence_length=1", "data.sequence_length=1"),
    ("good.yaml data.sequence_length=64 train.tokens_per_step=64", "data.sequence_length=64"),
    ("good.yaml data.directory=nowhere", "nowhere"),
    ("good.yaml data.directory=folder", "folder"),
    ("good.yaml data.directory=file", "file"),
    ("good.yaml data.directory=corpus_flipped", "corpus_flipped"),
    ("good.yaml data.directory=corpus_cut", "corpus_cut"),
    ("good.yaml data.directory=corpus_gone", "corpus_gone"),
    ("good.yaml data.directory=corpus_index", "corpus_index"),
    ("good.yaml data.directory=corpus_other", "corpus_other"),
    ("good.yaml data.directory=corpus_version", "corpus_version"),
    ("good.yaml data.directory=corpus_edited", "corpus_edited"),
    ("good.yaml data.directory=begun", "begun is an unfinished corpus"),
    ("good.yaml model.hiden_size=8", "did you mean model.hidden_size"),
    ("good.yaml model.hidden_size=wide", "hidden_size"),
    ("good.yaml model.hidden_act=nope", "hidden_act"),
    ("good.yaml model.hidden_act=5", "hidden_act"),
    ("good.yaml 'model.rope_parameters={rope_type: nope}'", "rope_type"),
    ("good.yaml 'model.rope_parameters={rope_type: yarn}'", "rope_parameters"),
    ("good.yaml model.rope_parameters=5", "rope_parameters"),
    ("good.yaml 'model.rope_parameters={rope_type: default, rope_theta: -1}'", "rope_theta"),
    ("good.yaml model.rms_norm_eps=-1", "rms_norm_eps"),
    ("good.yaml model.initializer_range=.nan", "initializer_range"),
    ("good.yaml model.attention_dropout=2", "attention_dropout"),
    ("good.yaml model.layer_types=[nope,nope]", "layer_types"),
    ("good.yaml model.layer_types=[full_attention]", "layer_types"),
    ("good.yaml model.num_key_value_heads=0", "num_key_value_heads"),
    ("good.yaml model.head_dim=3", "head_dim"),
    ("good.yaml model.vocab_size=10", "vocab"),
    ("good.yaml model.max_position_embeddings=0", "max_position_embeddings"),
    ("good.yaml model.mixer=blender", "mixer must be one of"),
    ("good.yaml 'model.mixer_options={stride: -1}'", "stride"),
    ("good.yaml 'model.mixer_options={strid: 1}'", "strid"),
    ("good.yaml model.recurrence=loop 'model.recurrence_options={trips: 0}'", "trips"),
    ("good.yaml model.recurrence=loop 'model.recurrence_options={trips: many}'", "trips"),
    ("good.yaml model.embedding_scale=.nan", "embedding_scale"),
    ("good.yaml model.pad_token_id=9999", "pad_token_id"),
    ("good.yaml model.from_pretrained=nowhere", "nowhere"),
    ("good.yaml model.from_pretrained=folder", "folder"),
    ("good.yaml model.from_pretrained=file", "file"),
    ("good.yaml model.from_pretrained=5", "model.from_pretrained=5"),
    ("small.yaml data.directory=corpus/out data.sequence_length=32 model.from_pretrained=plain", "plain"),
    *(
        (f"good.yaml model.from_pretrained=bad/{name} data.other_tokenizer=true --dry-run", name)
        for name in ("config_cut", "config_list", "config_type", "config_empty")
    ),
    ("good.yaml model.from_pretrained=bad/config_act data.other_tokenizer=true --dry-run", "hidden_act"),
    *(
        (f"good.yaml data.other_tokenizer=true model=null model.from_pretrained=bad/{name}", says)
        for name, says in (("weights_cut", "model.safetensors"), ("weights_pickle", "pytorch_model.bin"))
    ),
    ("good.yaml --out file", "file"),
    ("good.yaml --out file/run", "is not a directory"),
    ("good.yaml --out ''", "--run"),
    ("good.yaml --out run", "run"),
    ("good.yaml --out /proc/fathom", "/proc/fathom"),
    *((f"good.yaml --run {name} --dry-run", name) for name in ("file", "file/run", "/proc/fathom")),
    ("good.yaml --run plain", "plain holds a model (config.json)"),
    ("good.yaml --run corpus/out --dry-run", "corpus/out holds token shards (index.json)"),
    ("good.yaml data.directory=good.txt", "good.txt is a file, not a corpus: `fathom prepare good.txt"),
    ("--from run@last --run new", "run@last"),
    ("--from run --run new --cooldown soon", "soon"),
    ("--from run --run file train.steps=5 optim.schedule=constant", "file"),
    ("--from runs/damaged --run new", "runs/damaged"),
    ("--from runs/weightless --run new", "runs/weightless"),
    ("run train.seed=5", "train.seed"),
    ("runs/recipe_cut", "runs/recipe_cut"),
    ("runs/recipe_empty train.steps=9", "runs/recipe_empty"),
    ("runs/recipe_key", "optim.lrr"),
    ("runs/trainers train.steps=9 optim.schedule=constant", "runs/trainers"),
    ("unfinished data.directory=nowhere", "nowhere"),
]
COMPARE = [
    ("good.yaml", "--arms"),
    ("nowhere.yaml --arms vanilla,loop", "nowhere.yaml"),
    ("runs/nowhere", "runs/nowhere"),
    ("good.yaml --arms vanilla", "vanilla"),
    ("good.yaml --arms ''", "--arms"),
    ("good.yaml --arms ,", "--arms"),
    ("good.yaml --arms vanilla,vanilla", "vanilla"),
    ("good.yaml --arms vanilla,vanila", "vanila"),
    ("good.yaml --arms vanilla,a/b=loop", "a/b"),
    ("good.yaml --arms 'vanilla,a=loop;optim.lr=fast'", "optim.lr=fast"),
    ("good.yaml --arms 'vanilla,a=loop;train.seed=5'", "train.seed"),
    ("good.yaml --arms 'vanilla,a=loop;nonsense'", "nonsense"),
    ("good.yaml --arms 'vanilla,a=loop;model.hidden_act=nope'", "hidden_act"),
    ("good.yaml --arms vanilla,loop --seeds 0", "--seeds 0"),
    ("good.yaml --arms vanilla,loop --seeds few", "few"),
    ("good.yaml --arms vanilla,loop --pairs -1", "--pairs -1"),
    ("good.yaml --arms vanilla,loop --equal love", "love"),
    ("good.yaml --arms vanilla,loop --workers 0 --out new", "--workers 0"),
    ("good.yaml --arms vanilla,loop --threads 0 --out new", "--threads 0"),
    ("good.yaml --arms vanilla,loop --out file", "file"),
    ("good.yaml --arms vanilla,loop --out file/new", "file"),
    ("good.yaml --arms vanilla,loop --dry-run --out file", "file"),
    ("good.yaml --arms vanilla,loop --dry-run --out /proc/fathom", "/proc/fathom"),
    ("good.yaml --arms vanilla,loop --report --out new", "new"),
    ("good.yaml --arms vanilla,loop --report --retry-failed", "--retry-failed"),
    ("good.yaml --arms vanilla,loop data.directory=nowhere", "nowhere"),
    ("good.yaml --arms vanilla,loop data.directory=corpus_index", "corpus_index"),
    ("good.yaml --arms vanilla,loop --wrong", "--wrong"),
    ("folder", "folder"),
    ("plans/armless --arms vanilla,loop", "plans/armless"),
    *((f"plans/{name}", f"plans/{name}") for name in ("cut", "list", "keyless", "armless", "arm", "mechanism")),
    *((f"plans/{name}", f"plans/{name}") for name in ("seeds", "equal", "recipe", "recipes")),
    ("run", "run"),
]
LADDER = [
    ("", "required: recipe ("),
    ("nowhere.yaml --arms vanilla,loop", "nowhere.yaml"),
    ("runs/nowhere", "runs/nowhere"),
    ("binary.yaml --arms vanilla,loop", "binary.yaml"),
    ("good.yaml", "--arms"),
    ("good.yaml --arms vanilla,loop", "ladder"),
    ("folder", "folder"),
    ("cpu data.directory=corpus/out --arms vanilla", "vanilla"),
    ("cpu data.directory=corpus/out --arms vanilla,vanila", "vanila"),
    ("cpu data.directory=corpus/out --arms vanilla,loop --until dawn", "dawn"),
    ("cpu data.directory=corpus/out --arms vanilla,loop --workers 0", "--workers 0"),
    ("cpu data.directory=corpus/out --arms vanilla,loop --threads -1", "--threads -1"),
    ("cpu data.directory=corpus/out --arms vanilla,loop ladder.rungs=3", "ladder.rungs"),
    ("cpu data.directory=corpus/out --arms vanilla,loop ladder.nonsense=3", "ladder.nonsense"),
    (
        "cpu data.directory=corpus/out --arms 'mine=vanilla;train.steps=9,loop'",
        "mine: train.steps follows from the tokens",
    ),
    ("cpu data.directory=corpus/out --arms vanilla,loop --report --dry-run", "--report"),
]
BAD_MODELS = {
    **dict.fromkeys(("config_cut", "config_list", "config_empty", "config_binary", "config_twice"), "config.json"),
    **dict.fromkeys(("config_deep",), "config.json"),
    **dict.fromkeys(("config_hidden", "config_minus"), "hidden_size"),
    "config_wider": "shape",
    "config_layers": "layers",
    "config_mixer": "mixer",
    "config_option": "strid",
    "config_act": "hidden_act",
    "config_rope": "rope",
    "config_rope_text": "rope_parameters",
    "config_yarn": "rope",
    "config_dtype": "dtype",
    "config_type": "config_type",
    "config_number": "5",
    "config_context": "max_position_embeddings",
    "config_attention": "nope",
    "weights_cut": "model.safetensors",
    "weights_head": "model.safetensors",
    "weights_empty": "model.safetensors",
    "weights_noise": "model.safetensors",
    "weights_huge": "model.safetensors",
    "weights_gone": "no safetensors",
    "weights_pickle": "pytorch_model.bin",
    "weights_folder": "no safetensors",
    "weights_index": "index.json",
    "weights_map": "index.json",
    "tokenizer_cut": "tokenizer",
    "tokenizer_empty": "tokenizer",
    "tokenizer_list": "tokenizer",
    "tokenizer_settings": "tokenizer_config.json",
    "generation_cut": "generation_config.json",
    "generation_list": "generation_config.json",
    "adapter": "adapter",
}
OPENED = [
    ("nowhere", "nowhere"),
    ("file", "file"),
    ("folder", "folder"),
    ("unfinished", "unfinished"),
    ("run", "train.export"),
    ("reports/cut", "reports/cut"),
    ("reports/list", "reports/list"),
    ("reports/empty", "reports/empty"),
    ("reports/armless", "reports/armless"),
    ("reports/runless", "reports/runless"),
    ("reports/elsewhere", "reports/elsewhere"),
    ("''", "argument"),
]
CHAT = [
    ("", "model"),
    *OPENED,
    *((f"bad/{name}", says) for name, says in BAD_MODELS.items()),
    ("plain", "chat template"),
    ("model --weights int4", "--weights"),
    ("model --top-p 2", "--top-p"),
    ("model --set min_p", "--set min_p"),
]
GENERATE = [
    ("", "model"),
    *((f"{where} x", says) for where, says in OPENED),
    *((f"bad/{name} x", says) for name, says in BAD_MODELS.items()),
    ("bad/tokenizer_gone x", "tokenizer"),
    ("bad/config_typeless x", "model_type"),
    ("bad/generation_text x", "temperature"),
    ("model x --prompts prompts.jsonl --out new", "exclude each other"),
    ("model --prompts prompts.jsonl --json", "--json with --prompts needs --out"),
    ("model --prompts nowhere.jsonl --out new", "nowhere.jsonl"),
    ("model --prompts folder --out new", "folder"),
    ("model --prompts word.jsonl --out new", "word.jsonl"),
    ("model --prompts latin.jsonl --out new", "latin.jsonl"),
    ("model --prompts chatless.jsonl --out new", "chatless.jsonl"),
    ("model --prompts prompts.jsonl --out folder", "folder"),
    ("model --prompts prompts.jsonl --out file", "file"),
    ("model --prompts prompts.jsonl --out file/new", "file"),
    ("model --prompts prompts.jsonl --out prompts.jsonl", "prompts.jsonl"),
    ("model x --batch-size 2", "--batch-size needs --prompts"),
    ("model --prompts prompts.jsonl --out new --batch-size 0", "--batch-size 0"),
    ("model x --max-new-tokens 0", "--max-new-tokens 0"),
    ("model x --max-new-tokens some", "some"),
    ("model x --temperature -1", "--temperature -1"),
    ("model x --temperature nan", "--temperature nan"),
    ("model x --temperature inf", "--temperature inf"),
    ("model x --top-p 1.5", "--top-p 1.5"),
    ("model x --top-p nan", "--top-p nan"),
    ("model x --top-k -1", "--top-k -1"),
    ("model x --seed 99999999999999999999999", "--seed"),
    ("model x --set num_beams", "--set num_beams: expected key=value"),
    ("model x --set nope=1", "--set nope: transformers' GenerationConfig has no such option"),
    ("model x --set num_beams=0", "--set num_beams=0: allowed: a whole number, 1 or more"),
    ("model x --set num_beams=null", "num_beams"),
    ("model x --set max_length=5", "max_length"),
    ("model x --set min_p=high", "min_p"),
    ("model x --set min_p=2", "min_p=2: allowed: a number"),
    ("model x --set repetition_penalty=-1", "repetition_penalty"),
    ("model x --set typical_p=0", "typical_p"),
    ("model x --set stop_strings=5", "stop_strings"),
    ("model x --max-trips 0", "trips"),
    ("model x --max-trips 3", "trips"),
    ("model x --kvcache freqkv --kvcache-window 0", "window"),
    ("model x --kvcache freqkv --kvcache-window 16 --kvcache-ratio nan", "ratio"),
    ("model x --kvcache freqkv --kvcache-window 16 --kvcache-ratio 2", "ratio"),
    ("model x --kvcache freqkv --kvcache-window 16 --kvcache-kept 0", "not 0"),
    ("model x --kvcache freqkv --kvcache-window 16 --kvcache-kept 7.5", "--kvcache-kept"),
    ("model x --kvcache freqkv --kvcache-window 16 --kvcache-sinks -1", "sinks"),
    ("model x --kvcache tova --kvcache-window 16 --compile", "--compile: tova looks at queries"),
    ("model x --dtype float12", "float12"),
    ("model x --device nope", "--device nope"),
    ("model x --device cuda:99", "--device cuda:99"),
    ("model x --device ''", "--device"),
    ("model x y z", "z"),
    ("bad/config_kvcache x --kvcache freqkv", "kvcache"),
]
EVALUATE = [
    ("", "MODEL"),
    ("model", "--tasks"),
    *((f"{where} --perplexity good.txt", says) for where, says in OPENED),
    *(
        (f"bad/{name} --perplexity good.txt", BAD_MODELS[name])
        for name in ("config_cut", "config_list", "config_act", "weights_cut", "tokenizer_cut")
    ),
    ("model model --perplexity good.txt", "NAME=PATH"),
    ("a=model a=plain --perplexity good.txt", "'a'"),
    ("model --perplexity nowhere.txt", "nowhere.txt"),
    ("model --perplexity folder", "folder"),
    ("model --perplexity empty.txt", "empty.txt"),
    ("model --perplexity latin.txt", "latin.txt"),
    ("model --perplexity cut.jsonl.gz", "cut.jsonl.gz"),
    ("model --perplexity broken.jsonl", "broken.jsonl"),
    ("model --perplexity other.jsonl", "other.jsonl"),
    ("model --perplexity corpus_index", "corpus_index"),
    ("model --perplexity corpus/out --split test", "test"),
    ("model --perplexity corpus/out --text-field body", "--text-field body: all inputs are prepared corpora"),
    ("model --perplexity good.jsonl --split test", "--split test: no input is a prepared corpus"),
    ("model --perplexity corpus_wordless", "corpus_wordless"),
    ("model --perplexity a=good.txt a=good.jsonl --text-field body", "good.jsonl"),
    ("model --perplexity packed.txt", "packed.txt contains xz data"),
    ("model --perplexity good.txt --context 0", "--context 0"),
    ("model --perplexity good.txt --context 99999", "--context 99999"),
    ("model --perplexity good.txt --stride 0", "--stride 0"),
    ("model --perplexity good.txt --stride 9999", "--stride 9999"),
    ("model --perplexity good.txt --limit 0", "--limit 0"),
    ("model --perplexity good.txt --batch-size 0", "--batch-size 0"),
    ("model --tasks piqa --num-fewshot -1", "--num-fewshot -1"),
    ("model --perplexity good.txt --max-trips 0", "--max-trips 0"),
    ("model --perplexity good.txt --max-trips two", "--max-trips two"),
    ("model --perplexity good.txt --max-trips 1", "trips"),
    ("model --tasks nope_nope_nope", "tasks"),
    ("model --perplexity good.txt --dtype float12", "float12"),
    ("model --perplexity good.txt --device nope", "nope"),
    ("model --perplexity good.txt --out file", "file"),
    ("model --perplexity good.txt --out file/new", "file"),
    ("model --perplexity good.txt --out /proc/fathom", "/proc/fathom"),
    ("model --perplexity good.txt --out kept", "perplexity-good.json"),
]
EVALUATE_CACHES = (
    ("model --perplexity good.txt --kvcache nope", "nope"),
    ("model --perplexity good.txt --kvcache freqkv", "--kvcache-window"),
    ("model --perplexity good.txt --kvcache freqkv --kvcache-window 0", "window"),
    ("model --perplexity good.txt --kvcache freqkv --kvcache-window 16 --kvcache-ratio 2", "ratio"),
    ("model --perplexity good.txt --kvcache freqkv --kvcache-window 16 --at 0x", "--at 0x"),
    ("model --perplexity good.txt --kvcache freqkv --kvcache-window 16 --at ''", "--at"),
    ("model --perplexity good.txt --kvcache-window 16", "required: --kvcache"),
    ("bad/config_cut --perplexity good.txt --kvcache freqkv --kvcache-window 16", "config.json"),
    ("bad/config_kvcache --perplexity good.txt --kvcache freqkv", "kvcache"),
    ("model --tasks choice:good.jsonl --kvcache freqkv", "--tasks"),
    ("model --kvcache drop --kvcache-window 16 --stride 3", "--stride"),
)
EVALUATE_OTHERS = [
    ("deepened model model --perplexity good.txt", "required: CONTROL"),
    ("deepened model model model --kvcache drop", "--kvcache"),
    ("tuned model model --benchmark nowhere", "nowhere"),
    ("tuned model model --benchmark empty --tasks piqa", "--tasks"),
    ("samples model model", "two runs are called 'model'"),
    ("samples model", "two runs or more"),
    ("samples model other=nowhere", "nowhere: no such folder"),
    ("samples model other=model", "no samples_TASK_DATE.jsonl in it"),
]
SERVE = [
    ("", "model"),
    ("nowhere --port 0", "nowhere"),
    ("bad/config_act --port 0", "hidden_act"),
    ("bad/weights_cut --port 0", "model.safetensors"),
    ("bad/tokenizer_cut --port 0", "tokenizer"),
    ("model --port 99999", "--port 99999"),
    ("model --port -1", "--port -1"),
    ("model --port http", "http"),
    ("model --port {taken}", "{taken}"),
    ("model --port 0 --host no.such.host.invalid", "no.such.host.invalid"),
    ("model --port 0 --host ''", "--host"),
    ("model --port 0 --host 256.0.0.1", "256.0.0.1"),
    ("model --port 0 --api-key ''", "API key"),
    ("model --port 0 --name ''", "--name"),
    ("model --port 0 --grace -1", "--grace -1"),
    ("model --port 0 --grace nan", "--grace nan"),
    ("model --port 0 --dtype float12", "float12"),
    ("model --port 0 --device nope", "nope"),
    ("model --port 0 --max-trips 0", "trips"),
    ("model --port 0 --kvcache nope", "nope"),
    ("model --port 0 --kvcache-sinks 4", "--kvcache"),
    ("model x --port 0", "x"),
]
EXPORT = [
    ("", "--to"),
    ("model", "--to"),
    ("nowhere --to new", "nowhere"),
    ("file --to new", "file"),
    ("folder --to new", "folder"),
    ("unfinished --to new", "unfinished"),
    ("model --to new --as onnx", "onnx"),
    ("model --to new --as native", "mixer=depth_attention"),
    ("model --to new --as unrolled", "mixer=depth_attention"),
    ("model --to new --as gguf", "gguf"),
    ("model --to file", "file"),
    ("model --to file/new", "file"),
    ("model --to full", "full"),
    ("model --to model", "model"),
    ("model --to ''", "--to"),
    ("model --to /proc/fathom", "/proc/fathom"),
    ("run --to run", "run"),
    *((f"bad/{name} --to new", BAD_MODELS[name]) for name in BAD_MODELS),
    *((f"runs/{name} --to new", f"runs/{name}") for name in ("recipe_cut", "recipe_empty", "result_cut")),
    *((f"runs/{name} --to new", f"runs/{name}") for name in ("damaged", "manifests", "weightless", "result_list")),
]
LENS = [
    ("", "model"),
    ("model", "--file"),
    ("model x --file good.txt", "--file"),
    ("model --file nowhere.txt", "nowhere.txt"),
    ("model --file folder", "folder"),
    ("model --file latin.txt", "latin.txt"),
    ("model --file empty.txt", "no text"),
    ("model ''", "text"),
    ("nowhere x", "nowhere"),
    ("bad/config_act x", "hidden_act"),
    ("bad/weights_cut x", "model.safetensors"),
    ("bad/tokenizer_gone x", "tokenizer"),
    ("model x --compare nowhere", "nowhere"),
    ("model x --max-tokens 0", "--max-tokens 0"),
    ("model x --top 0", "--top 0"),
    ("model x --device nope", "nope"),
    ("model x -o folder", "folder"),
    ("model x -o file/new.html", "file"),
    ("model x -o nowhere/new.html", "nowhere"),
    ("model x -o /proc/fathom.html", "/proc/fathom.html"),
    ("model x -o ''", "--out"),
]
LINEAGE = [
    ("", "COMMAND"),
    ("prove model", "prove"),
    ("compare model", "B"),
    ("compare nowhere model", "nowhere"),
    ("compare model ./nowhere", "./nowhere"),
    ("compare folder model", "folder"),
    ("compare file model", "file"),
    ("compare noise.gguf model", "noise.gguf"),
    ("compare empty.gguf model", "empty.gguf"),
    ("compare other.gguf model", "other.gguf"),
    ("compare noise.safetensors model", "noise.safetensors"),
    *(
        (f"compare bad/{name} model", says)
        for name, says in {
            "config_cut": "config.json",
            "config_list": "config.json",
            "config_layers": "layers",
            "config_number": "model_type",
            "weights_cut": "model.safetensors",
            "weights_noise": "model.safetensors",
            "weights_huge": "model.safetensors",
            "weights_gone": "weights_gone",
            "weights_pickle": "weights_pickle",
            "tokenizer_cut": "tokenizer",
            "tokenizer_list": "tokenizer",
            "adapter": "adapter",
        }.items()
    ),
    ("compare model plain --mode slow", "slow"),
    ("compare model plain --seed -1", "--seed -1"),
    ("compare model plain --control nowhere", "nowhere"),
    ("compare model plain --null nowhere", "nowhere"),
    ("compare model plain --null file", "file"),
    ("compare model plain --null null.statement", "null.statement"),
    ("compare model plain --out file", "file"),
    ("compare model plain --out file/new", "file"),
    ("compare model plain --wrong", "--wrong"),
    ("portrait nowhere", "nowhere"),
    ("portrait cut.card", "cut.card"),
    ("portrait empty.card", "empty.card"),
    ("portrait list.card", "list.card"),
    ("portrait model --out folder", "folder"),
    ("portrait model --out file/new.png", "file"),
    ("portrait model --out good.txt", "not a portrait"),
    ("card nowhere --out new", "nowhere"),
    ("card model", "--out"),
    ("card model --out folder", "folder"),
    ("card model --out file/new", "file"),
    ("search cut.card", "--library"),
    ("search cut.card --library library", "cut.card"),
    ("search nowhere.card --library library", "nowhere.card"),
    ("search folder --library library", "folder"),
    ("search empty.card --library file", "empty.card"),
    ("search empty.card --library library --top -1", "--top -1"),
    ("identify model --library library", "library: no card in it"),
    ("identify model --library folder", "folder: no card in it"),
    ("identify model --library nowhere", "nowhere does not exist"),
    ("attack nowhere --out new --kind scale", "nowhere"),
    ("attack plain --out new --kind nope", "nope"),
    ("attack plain --out folder --kind scale", "folder"),
    ("attack plain --out file/new --kind scale", "file"),
    ("attack plain --out new --kind scale --dtype float12", "float12"),
    ("attack plain --out new --kind scale --seed -1", "--seed -1"),
    ("attack plain --out new", "--kind"),
    ("commit nowhere --out new", "nowhere"),
    ("commit model --out folder", "folder"),
    ("commit model --out new --blind", "--key-out"),
    ("commit model --out new --key-out new2", "--key-out"),
    ("commit model --out new --blind --key-out folder", "folder"),
    ("commit model --out new --blind --key-out file/key", "file"),
    ("commit model --out new --blind --key-out new", "--key-out"),
    ("verify nowhere model", "nowhere"),
    ("verify folder model", "folder"),
    ("verify cut.statement model", "cut.statement"),
    ("verify list.statement model", "list.statement"),
    ("verify empty.statement model", "empty.statement"),
    ("verify empty.statement", "empty.statement"),
    ("verify report.statement", "report.statement"),
    ("verify report9.statement", "report9.statement"),
    ("verify empty.statement model --key nowhere", "nowhere"),
    ("verify empty.statement model --key folder", "folder"),
    ("verify empty.statement model --key empty.txt", "empty.statement"),
    ("verify empty.statement model --key binary.yaml", "binary.yaml"),
    ("calibrate model --out new", "two"),
    ("calibrate model nowhere --out new", "nowhere"),
    ("calibrate model plain --out folder", "folder"),
    ("calibrate model plain --out new --mode slow", "slow"),
]
OTHERS = [
    ("corpus", "required: recipe ("),
    ("corpus nowhere.yaml", "nowhere.yaml"),
    ("corpus specialise/corpus --dry-run", "specialise"),
    ("ladder ladders/cpu", "--arms"),
    ("corpus folder", "folder"),
    ("mechanisms --config nowhere", "nowhere"),
    ("mechanisms --config folder", "folder"),
    ("mechanisms --config file", "file"),
    ("mechanisms --config binary.yaml", "binary.yaml"),
    ("mechanisms --config bad/config_cut", "config_cut"),
    ("mechanisms --config bad/config_type", "stranger"),
    ("mechanisms --config bad/config_hidden", "hidden_size"),
    ("mechanisms --config bad/config_act", "hidden_act"),
    ("mechanisms --config ''", "--config"),
    ("compare", "required: recipe ("),
    ("zzz", "zzz: no such command; there are train"),
    ("train --dryrun", "did you mean --dry-run?"),
    ("mechanisms extra", "extra"),
    ("recipes copy", "a recipe's name is missing"),
    ("recipes copy nope", "nope"),
    ("recipes copy tiny --to file", "file"),
    ("recipes copy tiny --to folder", "folder"),
    ("recipes copy tiny --to nowhere/new.yaml", "nowhere"),
    ("recipes copy tiny --to file/new.yaml", "file"),
    ("recipes list tiny", "to copy a recipe"),
    ("recipes paste tiny", "invalid choice: 'paste'"),
    ("'' x", "no such command"),
    ("Train good.yaml", "did you mean train"),
    ("--help-me", "--help-me"),
    ("serve bad/config_deep --port 0", "config.json"),
    ("deepen", "required"),
    ("deepen nowhere --with loop --out new", "nowhere"),
    ("deepen model --with nope --out new", "nope"),
    ("deepen model --with loop:trip=2 --out new", "trip"),
    ("deepen model --with loop --layers 7-9 --out new", "--layers 7-9"),
    ("deepen model --with loop --layers two --out new", "--layers two"),
    ("deepen model --with loop --out file", "file"),
    ("deepen model --with loop --out /proc/fathom", "/proc/fathom"),
    ("deepen model --with loop --sizes 1-2 --out new", "--sizes needs --search"),
    ("deepen model --with loop --tokens 5 --out new", "--tokens needs --search"),
    ("deepen model --with loop --search --text good.txt --lora --out new", "--lora has no meaning with --search"),
    ("deepen bad/tokenizer_empty --with loop --out new", "the tokenizer: its files have no 'added_tokens'"),
    ("deepen model --with loop --search --out new", "--text"),
    ("check", "required: model"),
    ("check nowhere", "nowhere"),
    ("check folder", "folder"),
    ("check model", "is an export of Fathom"),
    ("check model extra", "extra"),
    ("check good.yaml", "good.yaml"),
    ("check bad/config_cut", "config_cut"),
    ("check bad/config_type", "stranger"),
]
GENERATE_SET = [
    ("token_healing=true", "--set token_healing: transformers' GenerationConfig has no such"),
    ("repetition_penalty=1e-320", "repetition_penalty=1e-320: allowed: a number, 1e-06 to"),
    ("repetition_penalty=Infinity", "repetition_penalty=inf: allowed: a number, "),
    ("encoder_repetition_penalty=1e308", "encoder_repetition_penalty=1e+308: allowed: a number"),
    ("top_p=2", "top_p=2: allowed: a number, 0 to 1"),
    ("num_beams=two", "--set num_beams=two: allowed: a whole number, 1 or more"),
    ("num_beams=2.5", "--set num_beams=2.5: allowed"),
    ("min_new_tokens=two", "--set min_new_tokens=two: allowed: a whole number, 0 or more"),
    ("eos_token_id=end", "--set eos_token_id=end: allowed: a token id"),
    ("suppress_tokens=3", "--set suppress_tokens=3: allowed: a list"),
    ("max_time=a", "--set max_time: transformers: "),
    ("num_beams=2 length_penalty=a", "--set num_beams length_penalty: transformers: "),
    ("forced_eos_token_id=99999", "--set forced_eos_token_id: transformers: "),
]
if not torch.cuda.is_available():  # a GPU can do it
    GENERATE_SET.append(("cache_implementation=offloaded", "--set cache_implementation: transformers: "))
FEW = [
    ("generate model x --allow-control-tokens", "--allow-control-tokens needs --prompts"),
    ("generate model --out new", "--out needs --prompts"),
    ("generate model '\udcff'", "the prompt is not UTF-8"),
    ("chat model --system '\udcff'", "--system is not UTF-8"),
    ("prepare good.jsonl --tokenizer words --out new --held-out half", "--held-out half: allowed: a number"),
    ("corpus audit nowhere --benchmark mine=nowhere.jsonl", "nowhere.jsonl"),
    ("report nowhere", "nowhere: no such directory"),
    ("report good.txt", "good.txt: a file, not a run"),
    ("report plans/armless", "`fathom compare plans/armless --report` writes its report"),
    ("prepare good.txt --tokenizer nowhere --out new", "nowhere: no such directory or file; as a name on the Hub: "),
    ("new nothing x", "choose from 'cache', 'family', 'mixer'"),
    ("try model --with nope --out new", "nope"),
    ("try model --tokens 5 --out new", "tokens"),
]


@dataclass(frozen=True)
class Case:
    """A command line and what its complaint must mention."""

    line: str
    says: tuple[str, ...]


def _cases() -> Iterator[Case]:
    for line, *says in PREPARE:
        yield Case(f"prepare {line} --tokenizer words --out new", tuple(says))
    for line, *says in PREPARE_WITH:
        yield Case(f"prepare good.jsonl {line} --out new", tuple(says))
    for line, *says in PREPARE_OUT:
        yield Case(f"prepare good.jsonl --tokenizer words --out {line}", tuple(says))
    tables = {
        "train": TRAIN,
        "compare": COMPARE,
        "ladder": LADDER,
        "generate": GENERATE,
        "chat": CHAT,
        "evaluate": EVALUATE + EVALUATE_OTHERS,
        "evaluate caches": EVALUATE_CACHES,
        "serve": SERVE,
    }
    for command, table in {**tables, "export": EXPORT, "lens": LENS, "lineage": LINEAGE}.items():
        for line, *says in table:
            yield Case(f"{command} {line}", tuple(says))
    for line, *says in OTHERS + FEW:
        yield Case(line, tuple(says))
    for option, *says in GENERATE_SET:
        yield Case(f"generate model x --set {option}", tuple(says))


CASES = {case.line: case for case in _cases()}
PROGRESS = re.compile(r"[^ ]+: (opening )?[^ ]+|opening [^ ]+|fathom: warning: .*")
"""What a command may say before its complaint: `evaluate` and `train` name what they open."""
NOT_OURS = {".verified.json"}
"""A corpus remembers which of its shards were found intact."""
AS_PROCESSES = (
    "prepare bomb.jsonl.gz --tokenizer words --out new",
    "prepare good.jsonl --tokenizer word --out new",
    "train deep.yaml",
    "train good.yaml model.hidden_act=nope",
    "train good.yaml data.directory=corpus_index",
    "compare plans/recipes",
    "evaluate bad/config_cut --perplexity good.txt",
    "generate bad/config_twice x",
    "generate bad/weights_huge x",
    "serve bad/config_deep --port 0",
    "export bad/config_twice --to new",
    "lens bad/weights_cut x",
    "lineage compare bad/weights_huge model",
    "mechanisms --config folder",
    "check folder",
)
"""One of each command, those that could ask for the most memory first of all."""
MEMORY = 2 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of good and bad things; at the end every byte of it is as it was."""
    folder, before = tmp_path_factory.mktemp("things"), Path.cwd()
    make(folder)
    content = _content(folder)
    yield folder
    os.chdir(before)
    assert _content(folder) == content


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """A port that another program listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Among the things, without a network, and with every logger's lines where they can be seen."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for handler in logging.getLogger("transformers").handlers:
        if type(handler) is logging.StreamHandler:
            monkeypatch.setattr(handler, "stream", sys.stderr)
    from fathom.inference import launch

    # A server that starts would never end.
    monkeypatch.setattr(launch._Server, "run", lambda *_, **__: pytest.fail("it serves"))
    return place


def _files(folder: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(folder):
        yield from (Path(directory) / name for name in (*folders, *names) if name not in NOT_OURS)


def _stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of every file: inode, size and the times of its last changes, none of which survives a write."""
    stamps, folders = {}, [str(folder)]
    for place in folders:  # a thousand files, before and after each command: no objects for their paths
        for entry in os.scandir(place):
            status = entry.stat(follow_symlinks=False)
            held = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if stat.S_ISDIR(status.st_mode):
                folders.append(entry.path)
                held = ()
            if entry.name not in NOT_OURS:
                stamps[entry.path] = (status.st_ino, *held)
    return stamps


def _content(folder: Path) -> dict[str, str]:
    files = {path: path.read_bytes() if path.is_file() else b"" for path in _files(folder)}
    return {str(path.relative_to(folder)): hashlib.sha256(content).hexdigest() for path, content in files.items()}


def faults(code: object, errors: str, says: Sequence[str], before: object, after: object) -> list[str]:
    """What is not as it should be about the end of a command."""
    *earlier, last = errors.splitlines() or [""]
    found = [] if code == 2 else [f"exit {code}"]
    if not last.startswith("fathom: ") or last.startswith("fathom: warning"):
        found.append(f"no complaint: {errors!r}")
    found += [f"another line: {line!r}" for line in earlier if not PROGRESS.fullmatch(line)]
    found += [f"does not mention {word!r}: {last!r}" for word in says if word not in last]
    return found + ([] if before == after else ["files changed"])


_LAST: dict[Path, dict[str, tuple[int, ...]]] = {}
"""How a folder was after the command before."""


def _tried(case: Case, here: Path, taken: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    before = _LAST.pop(here, None) or _stamps(here)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        code = main(shlex.split(case.line.replace("{taken}", taken)))
    errors = capsys.readouterr().err + "".join(f"{warning.message}\n" for warning in warned)
    _LAST[here] = _stamps(here)
    return faults(code, errors, [word.replace("{taken}", taken) for word in case.says], before, _LAST[here])


WHOLE = {line for line, *_ in FEW} | {line for line in CASES if line.startswith(("generate model", "chat model"))}
WHOLE |= {"zzz", "Train good.yaml", "train ", "train binary.yaml", "train good.yaml model.mixer=blender"}
WHOLE |= {"evaluate deepened model model --perplexity good.txt", "evaluate tuned model model --benchmark nowhere"}
WHOLE |= {"evaluate caches model --perplexity good.txt --kvcache nope", "evaluate samples model model"}
WHOLE |= {"recipes list tiny", "corpus nowhere.yaml", "recipes copy", "recipes copy tiny --to file"}
LOADS = "evaluate model --tasks"
"""What imports lm-eval, which takes seconds."""
FAST = [line for at, line in enumerate(CASES) if (at % 8 == 0 and not line.startswith(LOADS)) or line in WHOLE]
"""Every eighth, and those that have no others of their kind; the rest is behind `slow`."""


@pytest.mark.parametrize("line", FAST)
def test_bad_inputs(line: str, here: Path, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _tried(CASES[line], here, taken, capsys) == []


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in CASES if line not in set(FAST)])
def test_more_bad_inputs(line: str, here: Path, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _tried(CASES[line], here, taken, capsys) == []


def test_there_are_enough() -> None:
    assert len(FAST) >= 160 and all(any(line.startswith(name) for line in FAST) for name in COMMANDS)
    assert set(AS_PROCESSES) | WHOLE <= set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("line", AS_PROCESSES)
def test_as_a_process(line: str, place: Path) -> None:
    """The same as the shell has it: the status, nothing but the complaint, and no more than 2 GiB."""
    before = _stamps(place)
    command = [sys.executable, "-m", "fathom", *shlex.split(line)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=place, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert faults(process.returncode, errors, CASES[line].says, before, _stamps(place)) == []
    assert usage.ru_maxrss << 10 <= MEMORY


def test_the_check_sees_what_is_wrong(tmp_path: Path) -> None:
    """Each fault planted: another status, two lines, silence, a warning, another culprit, a lost and a changed file."""
    good = "fathom: place: no such directory\n"
    assert faults(2, good, ["place"], {}, {}) == []
    assert faults(1, good, ["place"], {}, {}) == ["exit 1"]
    assert faults(2, "", [], {}, {}) == ["no complaint: ''"]
    assert faults(2, good + good, [], {}, {}) == [f"another line: {good.strip()!r}"]
    assert faults(2, "[transformers] hm\n" + good, [], {}, {}) == ["another line: '[transformers] hm'"]
    assert faults(2, good, ["elsewhere"], {}, {}) == [f"does not mention 'elsewhere': {good.strip()!r}"]
    try:
        raise KeyError("arms")
    except KeyError:
        seen = faults(1, traceback.format_exc(), [], {}, {})
    assert seen[0] == "exit 1" and any("no complaint" in fault for fault in seen)
    file = tmp_path / "file"
    file.write_text("mine")
    before = _stamps(tmp_path)
    assert _stamps(tmp_path) == before
    file.write_text("ours")
    assert faults(2, good, [], before, _stamps(tmp_path)) == ["files changed"]
    file.unlink()
    assert _content(tmp_path) == {} and faults(2, good, [], before, _stamps(tmp_path)) == ["files changed"]


def test_a_traceback_is_no_complaint(
    here: Path, taken: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug planted in a command comes through as itself."""
    monkeypatch.setattr("fathom.checkpoints.open.find_model", lambda path: {}["arms"])
    with pytest.raises(KeyError, match="arms"):
        _tried(CASES["generate nowhere x"], here, taken, capsys)
