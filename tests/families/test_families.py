"""Every causal language model of transformers passes or is refused by name with a reason, as docs/families.md
says.

One of each kind is part of the suite; `make test-families` tries the others.
"""

import pytest
import torch
import transformers

from proxima import PPOConfig
from proxima.models import Backbone
from proxima.models.probe import probe
from proxima.tools.doctor.memory_estimate import estimate_memory
from tests.families.check import check
from tests.families.networks import PAD, causal_configs, tiny_config, tiny_network
from tests.families.table import PAGE, read_table, render

TABLE = read_table(PAGE.read_text(encoding="utf-8"))
SAME_VERSION = f"transformers {transformers.__version__} " in PAGE.read_text(encoding="utf-8")
QUICK = ("llama", "falcon_h1", "hyperclovax", "modernbert-decoder", "mamba", "bert", "roberta", "bart", "openai-gpt",
         "qwen3_moe", "laguna", "llama4_text", "reformer", "xlnet")  # fmt: skip
FAMILIES = sorted(causal_configs())
SLOW = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES]


@pytest.mark.parametrize("family", SLOW)
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_passes_or_is_refused_as_the_docs_say(family, tmp_path):
    outcome = check(family, tmp_path)
    if SAME_VERSION and TABLE[family].status != "not built":  # another library may be here
        assert outcome == TABLE[family]


def test_the_table_has_every_architecture_and_its_counts_are_right():
    text = PAGE.read_text(encoding="utf-8")
    if SAME_VERSION:
        assert sorted(TABLE) == FAMILIES
    assert render(list(TABLE.values())).splitlines()[2:] == [
        line for line in text[text.index("| architecture |") :].splitlines() if line.startswith("|")
    ]
    assert f"registers {len(TABLE)} causal language models" in text
    assert all(outcome.reason for outcome in TABLE.values() if outcome.status != "passes")
    assert {outcome.status for outcome in TABLE.values()} == {"passes", "refused", "not built"}


def test_the_page_on_design_counts_the_architectures():
    assert f"| {len(TABLE)} architectures, tiny |" in (PAGE.parent / "design.md").read_text(encoding="utf-8")


def test_a_network_that_reads_both_ways_is_refused_by_name_and_told_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"the architecture bert \(BertLMHeadModel\) cannot be trained.*set is_decoder to true",
    ):
        probe(tiny_network("bert", is_decoder=False))


def test_a_network_with_noise_is_refused():
    network = tiny_network("granite")
    network.model.norm.register_forward_hook(lambda module, given, output: output + torch.randn_like(output))
    with pytest.raises(ValueError, match="the same tokens give other logits each time"):
        probe(network)


def test_a_network_whose_logits_are_not_its_hidden_states_alone_is_refused():
    network, seen = tiny_network("granite"), {}
    network.model.layers[0].register_forward_hook(
        lambda module, given, output: seen.update(scale=output.abs().mean(-1, keepdim=True))
    )
    network.lm_head.register_forward_hook(lambda module, given, output: output * seen.pop("scale"))
    with pytest.raises(ValueError, match="its logits cannot be computed from its last hidden states"):
        probe(network)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "gemma4_text", "jamba"])
def test_the_doctor_can_tell_the_memory_of_what_has_no_attention_heads_or_differs_by_layer(family):
    assert estimate_memory(PPOConfig(), tiny_config(causal_configs()[family])).total > 0


def test_positions_that_begin_after_the_padding_token_s_leave_fewer_for_tokens():
    backbone = Backbone(tiny_network("roberta", max_position_embeddings=512))
    assert backbone.passes.first_position == PAD + 1
    assert backbone.context_length == 512 - (PAD + 1)
    ids = torch.arange(512 - (PAD + 1))[None] % 250
    assert backbone.passes.hidden(ids, ids >= 0).isfinite().all()
