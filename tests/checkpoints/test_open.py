"""Directories that must not be opened, and those that must."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DiffLlamaConfig, DiffLlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fathom.checkpoints.find import find_model
from fathom.checkpoints.open import multiplies, open_checkpoint
from fathom.checkpoints.origin import LocalOrigin
from fathom.checkpoints.runs import open_source
from fathom.checkpoints.tensors import open_safetensors
from fathom.checkpoints.untrusted import check_checkpoint
from fathom.cli.main import main
from fathom.errors import ModelError
from fathom.models import FathomForCausalLM
from tests.tiny import export_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "tiny")


def edit(path, **keys):
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def shard(directory, **renamed):
    """Split the weights in two, with an index; returns the directory."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, directory / file, {"format": "pt"})
    (directory / "model.safetensors").unlink()
    weight_map = {name: renamed.get(file.split(".")[0], file) for file, members in parts.items() for name in members}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def bomb(d):
    return pickle.dumps(Bomb(d / "mark"))


def a_shard_elsewhere(d):
    (shard(d, two="../two.safetensors") / "two.safetensors").rename(d.parent / "two.safetensors")


def an_unknown_architecture(d):
    code = f"open({str(d / 'mark')!r}, 'w')\n"
    (d / "modeling.py").write_text(code)
    (d / "configuration.py").write_text(code)
    edit(d / "config.json", model_type="stranger", architectures=["Stranger"])


def stored(d, dtype, name="model.layers.1.self_attn.q_proj.weight"):
    """One tensor as another kind of number."""
    tensors = load_file(d / WEIGHTS)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, d / WEIGHTS, {"format": "pt"})


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OUTSIDE = json.dumps({"weight_map": {"x": "../../x.safetensors"}})
HOSTILE = {
    "a pickle": (
        lambda d: (d / WEIGHTS).rename(d / "pytorch_model.bin").write_bytes(bomb(d)),
        "pytorch_model.bin is a pickle",
    ),
    "a pickle beside the weights": (
        lambda d: (d / "training_args.pt").write_bytes(bomb(d)),
        "training_args.pt is a pickle",
    ),
    "a pickle called safetensors": (lambda d: (d / WEIGHTS).write_bytes(bomb(d) + bytes(100)), "does not fit"),
    "a shard elsewhere": (a_shard_elsewhere, "points outside its directory"),
    "a missing shard": (lambda d: (shard(d) / "two.safetensors").unlink(), "shard 'two.safetensors' is missing"),
    "a tensor in the wrong shard": (lambda d: shard(d, two="one.safetensors"), "which its shard does not have"),
    "a bad index beside good weights": (lambda d: (d / INDEX).write_text(OUTSIDE), "points outside its directory"),
    "truncated weights": (
        lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-1]),
        "outside the file",
    ),
    "a link outwards": (
        lambda d: (d / WEIGHTS).symlink_to((d / WEIGHTS).rename(d.parent / "elsewhere.safetensors")),
        "link that points outside",
    ),
    "a linked folder": (lambda d: (d / "folder").symlink_to(d.parent), "link that points outside"),
    "a pipe": (lambda d: os.mkfifo(d / "pipe"), "neither a file nor a directory"),
    "integers": (lambda d: stored(d, torch.int32), "'model.layers.1.self_attn.q_proj.weight' is stored as I32, not as"),
    "complex numbers": (lambda d: stored(d, torch.complex64), "is stored as C64, not as floats"),
    "an adapter": (lambda d: (d / "adapter_config.json").write_text("{}"), "adapter"),
    "downloaded attention": (
        lambda d: edit(d / "config.json", attn_implementation="someone/kernel"),
        "names code on the Hub",
    ),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "no safetensors weights"),
    "no json": (lambda d: (d / "config.json").write_text("{"), "not JSON"),
    "an unknown architecture": (an_unknown_architecture, "--trust-remote-code"),
}


@pytest.mark.parametrize(("harm", "words"), HOSTILE.values(), ids=HOSTILE)
def test_refused_with_the_reason(copy, harm, words, capsys, monkeypatch):
    harm(copy)
    if harm is not an_unknown_architecture:  # that one is transformers' to refuse
        monkeypatch.setattr(FathomForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("something was loaded"))
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", FathomForCausalLM.from_pretrained)
    assert main(["serve", str(copy), "--port", "0"]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith(f"fathom: {copy}: ") and "\n" not in error
    assert not (copy / "mark").exists()


RUNNING = (
    "data.PT Pytorch_Model.BIN a.bin.Index.json x.dill x.npy x.NPZ x.pt2 x.p x.msgpack x.h5 x.mar x.keras m/x.Pickle"
)


@pytest.mark.parametrize("name", RUNNING.split())
def test_files_that_may_run_code_are_known_in_any_case(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_bytes(b"")
    with pytest.raises(ModelError, match=f"{name} is a pickle or a format that may contain one"):
        check_checkpoint(copy)


VALUES = [
    ("config.json", "quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ("config.json", "quantization_config", {"quant_method": "evil"}),
    ("config.json", "num_attention_heads", 0),
    ("config.json", "num_key_value_heads", 32),
    ("config.json", "text_config", {"text_config": {}}),
    ("config.json", "dtype", "os.system"),
    ("config.json", "architectures", [7]),
    ("config.json", "rope_parameters", "evil"),
    ("generation_config.json", "watermarking_config", {"seeding_scheme": "evil", "evil": 1}),
    ("generation_config.json", "eos_token_id", [["evil"]]),
    ("generation_config.json", "num_beams", 0),
    ("generation_config.json", "min_length", "evil"),
    ("tokenizer_config.json", "model_max_length", "evil"),
    ("tokenizer_config.json", "eos_token", 7),
]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stock") / "diffllama"
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    DiffLlamaForCausalLM(DiffLlamaConfig(vocab_size=384, num_key_value_heads=2, **shape)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("file", "key", "value"), VALUES)
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_no_value_of_a_file_ends_in_a_traceback(kind, file, key, value, whole, stock, tmp_path, capsys):
    """Either it does no harm, or it is one line and exit code 2."""
    copy = shutil.copytree(whole if kind == "ours" else stock, tmp_path / "model")
    edit(copy / file, **{key: value})
    code = main(["generate", str(copy), "a", "--max-new-tokens", "1"])
    error = capsys.readouterr().err
    assert code == 0 or (code == 2 and error.count("fathom: ") >= 1 and "Traceback" not in error)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "the checkpoint lacks model.norm.weight"),
        (lambda t: [t.pop(name) for name in [*t]], "the checkpoint lacks lm_head.weight and "),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(9)}),
            "model.norm.weight has shape [9], but config.json needs",
        ),
        (lambda t: t.update(spare=torch.ones(9)), "contains unused tensors: spare"),
    ],
    ids=["lacks", "lacks all", "shape", "spare"],
)
def test_other_families_are_opened_whole_or_refused_in_one_line(change, said, stock, tmp_path, capfd):
    """transformers would print a table and start what is missing at random."""
    copy = shutil.copytree(stock, tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    code = main(["generate", str(copy), "a", "--max-new-tokens", "1"])
    error = capfd.readouterr().err
    assert said in error and "REPORT" not in error
    assert code == (0 if "spare" in said else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_on_a_cpu_that_imitates_them(dtype, copy, monkeypatch):
    """In float32, with the same values, and a line says so; as stored where that was asked for or the CPU is able."""
    FathomForCausalLM.from_pretrained(copy, dtype=dtype).save_pretrained(copy)
    (copy / "weights.sha256").unlink(missing_ok=True)
    name = str(dtype).removeprefix("torch.")
    for able, asked, expected in ((True, "auto", dtype), (False, name, dtype), (False, "auto", torch.float32)):
        monkeypatch.setattr("fathom.checkpoints.open.multiplies", lambda _, able=able: able)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            model, _ = open_checkpoint(copy, "cpu", asked)
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert any(f"stored in {name}" in str(one.message) for one in given) == (expected != dtype)
    stored = load_file(copy / "model.safetensors")
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], stored["model.embed_tokens.weight"].float())


def test_which_cpus_multiply_16_bits(monkeypatch):
    amd = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx512_fp16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: amd)
    assert not multiplies(torch.bfloat16) and multiplies(torch.float16)
    amd["avx512_bf16"] = True
    assert multiplies(torch.bfloat16)


def test_the_bomb_works(tmp_path):
    """The pickle above does what pickles can."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "mark"))).close()
    assert (tmp_path / "mark").exists()


def test_code_runs_only_where_it_is_trusted(copy):
    """The same directory with the user's word runs its code: the refusal is ours, not an accident."""
    an_unknown_architecture(copy)
    with pytest.raises((ModelError, AttributeError)):
        open_checkpoint(copy, "cpu", trust_remote_code=True)
    assert (copy / "mark").exists()


def test_good_directories_open(whole, copy, tmp_path):
    model, tokenizer = open_checkpoint(whole, "cpu")
    assert isinstance(model, FathomForCausalLM) and not model.training
    ids = tokenizer("The sailors", return_tensors="pt").input_ids
    expected = model(ids).logits
    shard(copy)
    assert torch.equal(open_checkpoint(copy, "cpu")[0](ids).logits, expected)
    assert open_checkpoint(copy, "cpu", "bfloat16")[0].dtype == torch.bfloat16
    with pytest.raises(ModelError, match="allowed: auto"):
        open_checkpoint(copy, "cpu", "float12")


def test_the_hub_cache_is_links_and_opens(whole, tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in whole.iterdir():
        shutil.copy(file, repository / "blobs" / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    assert check_checkpoint(snapshot)["model_type"] == "fathom"


def test_stock_qwen3_opens_as_ours(tmp_path):
    config = Qwen3Config(
        vocab_size=384, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1,
    )  # fmt: skip
    stock = Qwen3ForCausalLM(config).eval()
    stock.save_pretrained(tmp_path / "qwen3")
    tiny_tokenizer().save_pretrained(tmp_path / "qwen3")
    ids = torch.arange(8)[None]
    ours, _ = open_checkpoint(tmp_path / "qwen3", "cpu")
    assert type(ours) is FathomForCausalLM
    assert torch.equal(ours(ids).logits, stock(ids).logits)


def test_checking_imports_no_torch_model(whole):
    """The check reads names and headers; it is done before transformers is even imported."""
    code = (
        "import sys\n"
        "from fathom.checkpoints.untrusted import check_checkpoint\n"
        f"check_checkpoint({str(whole)!r}); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_integers_that_are_no_weights_are_let_through(copy):
    """A mask or positions in the files of another family, and the weights of a packed format."""
    stored(copy, torch.float16)
    assert check_checkpoint(copy)
    tensors = load_file(copy / WEIGHTS)
    others = {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "embeddings.position_ids": torch.arange(4)}
    save_file({**tensors, **others}, copy / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="is stored as"):
        check_checkpoint(copy)  # none of ours is of integers
    edit(copy / "config.json", model_type="gpt2")
    assert check_checkpoint(copy)
    stored(copy, torch.int8)
    with pytest.raises(ModelError, match="is stored as I8"):
        check_checkpoint(copy)
    packed = {"quantization_config": {"quant_method": "bitsandbytes"}}
    edit(copy / "config.json", text_config={"decoder": packed})
    assert check_checkpoint(copy)
    edit(copy / "config.json", text_config={"decoder": {}})
    with pytest.raises(ModelError, match="is stored as I8"):
        check_checkpoint(copy)
    edit(copy / "config.json", **packed)
    assert check_checkpoint(copy)


@pytest.mark.parametrize("name", ["nowhere.gguf", "models/nowhere.gguf", "/nowhere/at/all.gguf"])
def test_a_gguf_file_that_is_not_there_is_called_a_file(name, tmp_path, monkeypatch):
    """By every way of opening, and no repository of that name is asked for."""
    monkeypatch.chdir(tmp_path)
    for opens in (open_checkpoint, open_source, find_model):
        with pytest.raises(ModelError, match=rf"^{name}: no such file$"):
            opens(Path(name))
    with pytest.raises(ModelError, match=r"^nowhere: no such directory$"):
        open_checkpoint("nowhere")


def test_what_trainers_leave_behind_is_not_opened(whole, tmp_path):
    """`training_args.bin` of transformers' trainers: the model opens, and the pickle stays closed."""
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    (copy / "training_args.bin").write_bytes(pickle.dumps(Bomb(copy / "mark")))
    assert check_checkpoint(copy)["model_type"]
    AutoModelForCausalLM.from_pretrained(copy)
    assert not (copy / "mark").exists()


def test_the_weights_that_are_read_are_named_where_there_are_others(copy):
    whole = (copy / "model.safetensors").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_checkpoint(shard(copy))  # the negative control: shards of one index are one format
    for name in ("model.safetensors", "model-q8.gguf"):
        (copy / name).write_bytes(whole)
    with pytest.warns(UserWarning, match="from model.safetensors, not from model-q8.gguf, one.safetensors, two.saf"):
        check_checkpoint(copy)
    for n in range(9):
        (copy / f"pytorch_model-{n}.bin").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"from model.safetensors, not from .*, .*, \S+ and 9 more$"):
        open_safetensors(LocalOrigin(copy))
