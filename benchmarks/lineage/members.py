"""Who lives in the zoo: bases, what was made from them, and what must be said of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import edited
import trained
from trained import Size, Workshop

from fathom.lineage import open_weights
from fathom.lineage.attacks import attack

SIZES = {
    "micro": Size(32, 2, 2, 1, 16, 64, vocab=300, steps=4, rows=2, length=32, text_bytes=1 << 16),
    "tiny": Size(128, 4, 4, 2, 32, 352, vocab=1024, steps=400, rows=8, length=128),
    "small": Size(256, 6, 8, 4, 32, 704, vocab=4096, steps=1500, rows=16, length=256, text_bytes=1 << 24),
}

BASE, DISTILLED = "base", "distillation"
DERIVED = "derived"  # must be found
STRESS = "stress"  # a lineage so far gone, or so mixed, that nothing is promised; shown whatever it gives
PART = "part"  # some tensors were taken
SEED = "same seed"  # the same initial weights, other training


@dataclass(frozen=True)
class Member:
    """A model: what it is made from, and what `compare` with its root ought to say."""

    name: str
    kind: str
    claim: str
    roots: tuple[str, ...]  # bases whose weights, or initial weights, are in it
    make: Callable[[Workshop], None]
    data: str = "library"
    shape: str = "standard"


def bases() -> Iterator[Member]:
    """Models trained from scratch: same data and order, other data, other optimiser, shape and tokenizer."""

    def one(name: str, seed: int, data: str = "library", shape: str = "standard", **how: object) -> Member:
        return Member(
            name,
            "base",
            BASE,
            (name,),
            lambda shop: trained.base(shop, name, seed, data, **how),
            data,
            shape,  # type: ignore[arg-type]
        )

    for seed, name in enumerate("abcd"):
        yield one(name, seed)
    yield one("e", 4, "headers")
    yield one("f", 5, "headers")
    yield one("muon", 6, optimiser="muon", lr=1e-2)
    yield Member("wide", "base", BASE, ("wide",), lambda shop: wide(shop, "wide", 7), "library", "wide")
    yield Member("wide-2", "base", BASE, ("wide-2",), lambda shop: wide(shop, "wide-2", 8), "library", "wide")
    yield Member("mha", "base", BASE, ("mha",), lambda shop: every_head(shop, "mha", 9), "library", "mha")
    yield one("tied", 10, shape="tied", tie_word_embeddings=True)
    yield one("retokenized", 11, "library-cut-otherwise")
    yield one("tied-2", 14, shape="tied", tie_word_embeddings=True)
    yield distillate("a-student", 12, "library")
    yield distillate("a-student-other", 13, "headers")


def wide(shop: Workshop, name: str, seed: int) -> None:
    """Half as wide again, one layer less."""
    size = shop.size
    trained.base(
        shop,
        name,
        seed,
        hidden_size=size.width * 3 // 2,
        num_attention_heads=size.heads * 3 // 2,
        num_key_value_heads=size.heads * 3 // 4,
        num_hidden_layers=size.layers - 1,
        intermediate_size=size.ffn * 3 // 2,
    )


def every_head(shop: Workshop, name: str, seed: int) -> None:
    """As many key heads as query heads."""
    trained.base(shop, name, seed, num_key_value_heads=shop.size.heads)


def distillate(name: str, seed: int, data: str) -> Member:
    """A student of `a`: a root of its own."""
    return Member(
        name, DISTILLED, DISTILLED, (name,), lambda shop: trained.distilled(shop, "a", name, seed, data), data
    )


def learned(root: str, other: str) -> Iterator[Member]:
    """What training makes of a base; `other` is the text it has not seen."""

    def one(
        name: str, kind: str, make: Callable[[Workshop, str], None], claim: str = DERIVED, root: str = root
    ) -> Member:
        full = f"{root}-{name}"
        return Member(full, kind, claim, (root,), lambda shop: make(shop, full))

    def continued(corpus: str, steps: float, lr: float, **how: str) -> Callable[[Workshop, str], None]:
        return lambda shop, name: trained.base(shop, name, 0, corpus, steps, lr, start=root, **how)  # type: ignore[arg-type]

    yield one("sft", "SFT", continued("lessons", 0.15, 2e-4))
    yield one("lora", "SFT", lambda shop, name: trained.low_rank(shop, root, name))
    yield one("rl", "RL", lambda shop, name: trained.reinforced(shop, root, name))
    yield one("cpt", "CPT 1×", continued(other, 1.0, 1e-3))
    yield one("cpt-hot", "CPT 1×", continued(other, 1.0, 3e-3))
    if root != "a":
        return
    yield one("cpt-quarter", "CPT ¼×", continued(other, 0.25, 1e-3))
    yield one("cpt-muon", "CPT 1×, Muon", continued(other, 1.0, 1e-2, optimiser="muon"), STRESS)
    yield one("cpt-4x", "CPT 4×", continued(other, 4.0, 3e-3), STRESS)
    yield one("multimodal", "multimodal", lambda shop, name: trained.multimodal(shop, root, name))
    yield one("moe", "upcycling", lambda shop, name: trained.upcycled(shop, root, name, split=False))
    yield one("moe-split", "upcycling", lambda shop, name: trained.upcycled(shop, root, name, split=True))


Edit = Callable[[Workshop], "edited.Checkpoint"]


def written(name: str, kind: str, claim: str, roots: tuple[str, ...], edit: Edit) -> Member:
    """A member that is an edited checkpoint."""
    return Member(name, kind, claim, roots, lambda shop: edit(shop).write(shop.model(name)))


def cut(root: str, size: Size) -> Iterator[Member]:
    """What needs no training: numbers rounded, tensors thinned, layers, channels, neurons and heads taken out."""
    depth, half = size.layers, size.layers // 2

    def one(
        name: str, kind: str, edit: Callable[[edited.Checkpoint], edited.Checkpoint], claim: str = DERIVED
    ) -> Member:
        return written(f"{root}-{name}", kind, claim, (root,), lambda shop: edit(shop.read(root)))

    yield one("int8", "int8", lambda m: edited.quantised(m, 8))
    yield one("int4", "int4", lambda m: edited.quantised(m, 4))
    yield one("sparse-80", "pruning ≤ 80 %", lambda m: edited.sparse(m, 0.8))
    yield one("depth-half", "depth ≥ 50 %", lambda m: edited.kept_layers(m, range(0, depth, 2)))
    yield one("width-half", "width ≥ 50 %", lambda m: edited.kept_channels(m, m.config["hidden_size"] // 2))
    if root != "a":
        return
    yield one("fp8", "fp8", edited.float8)
    yield one("sparse-50", "pruning ≤ 80 %", lambda m: edited.sparse(m, 0.5))
    yield one("two-of-four", "pruning ≤ 80 %", edited.two_of_four)
    yield one("depth-less-1", "depth ≥ 50 %", lambda m: edited.kept_layers(m, [*range(depth - 2), depth - 1]))
    yield one("depth-first", "depth ≥ 50 %", lambda m: edited.kept_layers(m, range(half)))
    yield one("deeper", "layers repeated", lambda m: edited.kept_layers(m, [*range(half + 1), *range(1, depth)]))
    yield one("width-3-of-4", "width ≥ 50 %", lambda m: edited.kept_channels(m, size.width * 3 // 4))
    yield one("neurons-half", "neurons, heads", lambda m: edited.kept_neurons(m, 0.5))
    yield one("heads-half", "neurons, heads", lambda m: edited.kept_heads(m, max(size.kv_heads // 2, 1)))
    yield one("reward", "reward model", lambda m: edited.reward_model(m, 0))
    yield one("noise-1", "noise 1×", lambda m: edited.noised(m, 1.0, 0), STRESS)
    yield one("new-embedding", "embedding replaced", lambda m: edited.new_embedding(m, 0), STRESS)
    yield Member(
        "a-shuffled", "ids shuffled", DERIVED, ("a",),
        lambda shop: edited.with_ids_shuffled(shop.read("a"), 0, shop.model("a-shuffled")),
    )  # fmt: skip


STORED, PADDED = "tied, head stored", "zero-padded"
ALIKE = (STORED, PADDED)  # strangers that were treated alike: every two of a kind are compared


def treated_alike() -> Iterator[Member]:
    """Bases that nothing relates, changed in the same way: what is alike in them is no lineage."""
    for root in ("tied", "tied-2"):
        yield written(f"{root}-stored", STORED, DERIVED, (root,), lambda s, root=root: edited.stored_head(s.read(root)))  # type: ignore[misc]
    for root in ("a", "b"):
        yield written(
            f"{root}-padded",
            PADDED,
            DERIVED,
            (root,),
            lambda s, root=root: edited.padded_neurons(s.read(root), 0.25),  # type: ignore[misc]
        )


def mixed(size: Size) -> Iterator[Member]:
    """Merges, models with parts of others, pruned models that recovered, and the same seed on other data."""

    def merge(*names: str, shares: tuple[float, ...]) -> Edit:
        return lambda shop: edited.merged([shop.read(n) for n in names], shares)

    yield written("a-merge", "merge ≥ 30 %", DERIVED, ("a",), merge("a-sft", "a-cpt-hot", shares=(0.5, 0.5)))
    yield written("a-merge-70", "merge ≥ 30 %", DERIVED, ("a",), merge("a-rl", "a-cpt-hot", shares=(0.3, 0.7)))
    yield written("a-b-50", "merge with a stranger", DERIVED, ("a", "b"), merge("a", "b", shares=(0.5, 0.5)))
    yield written("a-b-30", "merge with a stranger", DERIVED, ("a", "b"), merge("a", "b", shares=(0.3, 0.7)))
    yield from (healed(start) for start in ("a-sparse-80", "a-depth-half", "a-width-half"))
    stolen = range(1, 1 + size.layers // 2)
    roots = ("a", "b")
    yield written(
        "b-a-layers", "half the layers", PART, roots, lambda s: edited.stitched(s.read("b"), s.read("a"), stolen)
    )
    yield from (transplant(part) for part in ("mlp", "self_attn", "embed_tokens"))
    yield Member(
        "a-seed", "same seed, other data", SEED, ("a",), lambda shop: trained.base(shop, "a-seed", 0, "headers")
    )
    yield Member("a-start", "step 0", SEED, ("a",), lambda shop: trained.untrained(shop, "a", "a-start", 0))


def healed(start: str) -> Member:
    """A pruned model trained on for a quarter of its base's steps."""
    name = f"{start}-healed"

    def make(shop: Workshop) -> None:
        trained.base(shop, name, 0, "library", 0.25, 1e-3, start=start)

    return Member(name, "pruned, trained on", DERIVED, ("a",), make)


def transplant(part: str) -> Member:
    """`b` with one kind of `a`'s weights."""

    def edit(shop: Workshop) -> edited.Checkpoint:
        return edited.transplanted(shop.read("b"), shop.read("a"), part)

    return written(f"b-a-{part}", f"{part} alone", PART, ("a", "b"), edit)


ATTACKS = ("permute", "rotate", "gain", "plane", "head", "neuron", "scale")
REGAUGED = ("gain", "plane", "head", "neuron")


def disguised() -> Iterator[Member]:
    """Function-preserving edits, on a base and on models trained on from it."""
    for kind in ATTACKS:
        yield disguise("a", f"a-{kind}", f"attack: {kind}", (kind,))
    for root, made in (("a-sft", "SFT"), ("a-cpt-hot", "CPT 1×")):
        yield disguise(root, f"{root}-permuted", f"{made}, permuted, regauged", ("permute", *REGAUGED))
        yield disguise(root, f"{root}-turned", f"{made}, rotated, regauged", ("rotate", *REGAUGED))


def disguise(start: str, name: str, kind: str, kinds: tuple[str, ...]) -> Member:
    """A copy that computes the same."""

    def make(shop: Workshop) -> None:
        attack(open_weights(shop.model(start)), kinds, shop.model(name))

    return Member(name, kind, DERIVED, ("a",), make)


def members(size: Size) -> list[Member]:
    """All of them; nobody comes before what it is made from."""
    out = [*bases(), *learned("a", "headers"), *learned("e", "library"), *cut("a", size)]
    out += [m for root in ("e", "tied", "muon", "wide") for m in cut(root, size)]
    return [*out, *treated_alike(), *mixed(size), *disguised()]
