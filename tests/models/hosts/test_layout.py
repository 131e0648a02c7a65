"""A layout that does not fit is one clear line."""

import pytest

import fathom
from fathom.checkpoints.families.layouts import HOSTS
from fathom.models.hosts.layout import Layout

from .cases import ours_of, theirs_of


@pytest.mark.quick("token")
@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"norm": "ln_f"}, "qwen3_moe: its decoder has no ln_f"),
        ({"embedding": "wte"}, "qwen3_moe: its decoder has no wte"),
        ({"token": ("attn",)}, "no layout matches the parts of Qwen3MoeDecoderLayer: input_layernorm, mlp, "),
        (
            {"before": (None, None)},
            "Qwen3MoeDecoderLayer: its layout does not name the parts input_layernorm, post_attention",
        ),
    ],
    ids=["norm", "embedding", "token", "before"],
)
def test_a_wrong_layout_is_one_line(layout, says, monkeypatch):
    monkeypatch.setitem(HOSTS, "qwen3_moe", HOSTS["qwen3_moe"])
    fathom.add_family("qwen3_moe", Layout(**layout))
    with pytest.raises(ValueError, match=says):
        ours_of(theirs_of("qwen3_moe"))
