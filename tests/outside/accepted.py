"""What transformers' common tests ask of a model and ours do otherwise, by mechanism and test: the reason for each.

The list is strict: a test that stands here and passes is an error. Qwen3 under the same tests needs no entry.
"""

STRICT = "from_pretrained refuses a checkpoint that lacks a tensor, where transformers starts that tensor at random"
REENTRANT = "use_reentrant=True loses the gradients to depth sources and other trips, so it is refused"
VISITS = "attentions are one for every pass through a layer, and there are more passes than layers"
SLOTS = "the trips of all tokens stand side by side in one pass: attention is over slots, not over tokens"
SLICES = "a trip's hidden states are slices of a pass over all trips, which nothing after them reads"
MOCK = "the test recomputes every pass through a layer with the arguments of the last; ours differ from pass to pass"

ONE_TRIP = {
    "test_base_model_prefix_loads_base_weights": STRICT,
    "test_correct_missing_keys": STRICT,
    "test_model_weights_reload_no_missing_tied_weights": STRICT,
}

ACCEPTED: dict[str, dict[str, str]] = {
    "qwen3": {},
    "vanilla": ONE_TRIP,
    "depth_attention": {**ONE_TRIP, "test_training_gradient_checkpointing_use_reentrant_true": REENTRANT},
    "hyper_connections": ONE_TRIP,
    "loop": {**ONE_TRIP, "test_attention_outputs": VISITS},
    "ponder2": {
        **ONE_TRIP,
        "test_training_gradient_checkpointing_use_reentrant_true": REENTRANT,
        "test_attention_outputs": VISITS,
        "test_sliding_window_mask": SLOTS,
        "test_retain_grad_hidden_states_attentions": SLICES,
        "test_training_gradient_checkpointing": MOCK,
        "test_training_gradient_checkpointing_use_reentrant_false": MOCK,
    },
}

SKIPPED = {
    "test_can_capture_specific_layers_hidden_states": (
        "is for hidden states that transformers' hooks record; ours are kept by the model, and tested in tests/models"
    ),
}
"""Tests that run on Qwen3 and skip each of our models: as strict."""

UNSEEN = "tests of generation, from the tag's archive, count one cache entry for each layer; not yet held to the letter"
SEVERAL_TRIPS = ("loop", "ponder2")
"""Mechanisms whose tests of generation may fail, or pass, where the archive is reached."""
