"""The table of a slot cache: which places a trip reads, copied out or under a mask, is one sum."""

import ast
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache

import fathom
from fathom.models.axes.roles import View
from fathom.models.trips import slot_table
from fathom.models.trips.fixed_table import FixedTable
from fathom.models.trips.slot_cache import SlotLayer
from fathom.models.trips.slot_table import SlotTable, grown

from .cases import tokens
from .slot_oracle import OPEN, thinker
from .test_pondering import error, oracle
from .test_slot_cache import EXACT, goes_on

NARROWED = pytest.mark.parametrize("method", ["ponder-duo", "adaponder", "latent_cot"])


def course(model, gathers, monkeypatch):
    """Last logits of three padded rows that halt apart, read in chunks and token by token, exchanged and taken back.

    Whether slots are gathered is `gathers`, whatever the rule says; the index is one that could be made anew.
    """
    asked = []
    monkeypatch.setattr(slot_table, "gathering_pays", lambda *sizes: (asked.append(sizes), gathers)[1])
    mask = (torch.arange(12) >= torch.tensor([2, 0, 1])[:, None]).long()
    cache, ids, found = DynamicCache(config=model.config), tokens(3, 12), []
    for start, stop, move in ((0, 5, ""), (5, 6, "exchange"), (6, 7, ""), (7, 10, "crop"), (9, 10, ""), (10, 12, "")):
        seen = mask[:, :stop]
        where = (seen.cumsum(1) - 1).clamp(min=0)[:, start:]
        found.append(goes_on(model, cache, ids[:, start:stop], attention_mask=seen, position_ids=where)[:, -1])
        table = cache.layers[0].table
        assert asked and bool(table.index.shape[1]) == gathers
        assert not gathers or torch.equal(table.index, table._indexed())
        if move == "exchange":
            order = torch.tensor([2, 0, 0])
            cache.reorder_cache(order)
            ids, mask = ids[order], mask[order]
        if move == "crop":
            cache.crop(-1)
    return torch.stack(found)


@NARROWED
def test_gathered_is_masked(method, monkeypatch):
    """An index that is off by one trip is seen."""
    model = oracle(method)[0]
    masked = course(model, False, monkeypatch)
    assert error(course(model, True, monkeypatch), masked) < EXACT
    narrow = SlotTable.narrow

    def faulty(table, placement, query, trip, alone):
        return narrow(table, placement, query, max(trip - 1, 0), alone)

    monkeypatch.setattr(SlotTable, "narrow", faulty)
    assert error(course(model, True, monkeypatch), masked) > 1e-3


@NARROWED
def test_masked_and_gathered_rows_are_the_same_sum(method, monkeypatch):
    """To the last bit where nothing is left out: one token made one trip, and the next makes one."""
    model, ids = oracle(method)[0], tokens(2, 5)
    found = []
    for gathers in (False, True):
        monkeypatch.setattr(slot_table, "gathering_pays", lambda *sizes, says=gathers: says)
        cache = DynamicCache(config=model.config)
        found.append(goes_on(model, cache, ids[:, :4], max_trips=1))
        found.append(goes_on(model, cache, ids[:, 4:], max_trips=1))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.fixture
def reads(monkeypatch):
    """Of every pass: how many places of a row attention reads, and whether they were copied."""
    seen, exchange = [], SlotLayer.exchange

    def noted(layer, placement, new):
        pair = exchange(layer, placement, new)
        places, kept = (x.untyped_storage().data_ptr() for x in (pair[0], layer.stored[0]))
        seen.extend([(pair[0].shape[2], places != kept)] if layer.first else [])
        return pair

    monkeypatch.setattr(SlotLayer, "exchange", noted)
    return seen


@pytest.mark.parametrize(
    ("method", "growing", "fixed"),
    [
        ("adaponder", [(7, True)] * 4, [9, 9, 9, 9]),  # a slot of each token, of 25 to 28
        ("latent_cot", [(7, True), (26, False), (27, False), (28, False)], [36] * 4),
        ("ponder3", [(25, False), (26, False), (27, False), (28, False)], [36] * 4),
    ],
)
def test_what_a_token_reads(method, growing, fixed, reads):
    """After six tokens of four trips. Of fixed places nothing is copied."""
    model, ids = thinker(method, **OPEN[method], **({"trips": 4} if method == "ponder3" else {})), tokens(1, 7)
    for cache, expected in (
        (DynamicCache(config=model.config), growing),
        (StaticCache(config=model.config, max_cache_len=9), [(places, False) for places in fixed]),
    ):
        goes_on(model, cache, ids[:, :6])
        reads.clear()
        goes_on(model, cache, ids[:, 6:])
        assert reads == expected


def test_when_gathering_pays():
    """A query alone wants 2.5 places stored for each that it reads; a prompt's, or some rows of a batch, any more."""
    assert slot_table.gathering_pays(1, 100, 251, False) and not slot_table.gathering_pays(1, 100, 250, False)
    for queries, copied in ((10**6, False), (1, True)):
        assert slot_table.gathering_pays(queries, 100, 101, copied)
        assert not slot_table.gathering_pays(queries, 100, 100, copied)


def test_a_buffer_keeps_its_places():
    old = torch.arange(6.0).view(1, 6, 1)
    assert grown(old, 9, 5).flatten().tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("view", list(View))
def test_a_table_is_whole_from_the_start(view):
    """No field waits for a later call to be made, and a view changes no field's type."""
    device = torch.device("cpu")
    for table in (SlotTable(2, view, device), FixedTable(4, 3, 2, view, device)):
        fields = {name: type(value) for name, value in vars(table).items()}
        assert type(None) not in fields.values() and len(table.count) == len(table.halt) == 2
        emptied = table.emptied(3, device)
        assert {name: type(value) for name, value in vars(emptied).items()} == fields and len(emptied.count) == 3


def assigned(source):
    """Fields of something called `table` that code assigns."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        targets = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in targets:
            owner = target.value if isinstance(target, ast.Attribute) else None
            if getattr(owner, "id", None) == "table" or getattr(owner, "attr", None) == "table":
                found.add(target.attr)
    return found


def test_only_models_write_to_a_table():
    """The batches of the server say where a pass is (`at`)."""
    files = [path for path in Path(fathom.__file__).parent.rglob("*.py") if "/fathom/models/" not in path.as_posix()]
    read = {str(path): path.read_text() for path in files}
    texts = {path: text for path, text in read.items() if "table" in text and "rich.table" not in text}
    assert len(files) > 100 and {path: names for path, text in texts.items() if (names := assigned(text))} == {}
    assert assigned("table = x\ntable.end, (a.table.columns) = 1, 2\nb.table.count += 1\n") == {
        "end",
        "columns",
        "count",
    }
