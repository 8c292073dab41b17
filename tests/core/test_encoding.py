"""Tokenizers that add tokens of their own: BOS stays before a prompt however it is cut, EOS never stands
after one."""

import json

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from proxima.base_setup.tokenizer_setup import load_tokenizer
from proxima.config import PPOConfig
from proxima.core.encoding import added_ids, encode_prompts
from proxima.core.pairs import as_pairs
from proxima.data.chat_templates import ChatTemplate
from proxima.data.data_check import check
from proxima.finetuning.example_batches import encode
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.prompt_tokens import tokenize
from proxima.rewards.reward_samples import tokens_of
from proxima.token_attribution.sa_pair_builder import ensure_tokens
from proxima.tools.doctor import examine
from proxima.world.tiny_models import EOS_TOKEN, byte_tokenizer

EOS, BOS, CONTEXT = 256, 257, 64
PLAIN, FIRST, LAST, BOTH = "$A", "<s> $A", f"$A {EOS_TOKEN}", f"<s> $A {EOS_TOKEN}"
ADDED = {PLAIN: ([], []), FIRST: ([BOS], []), LAST: ([], [EOS]), BOTH: ([BOS], [EOS])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model, with a tokenizer of each kind."""
    home, made = tmp_path_factory.mktemp("adding"), {}
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"eos_token_id": EOS, "bos_token_id": BOS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=258, max_position_embeddings=CONTEXT, initializer_range=0.2, **shape, **ids
            )
        )
    for number, template in enumerate(ADDED):
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        inner = tokenizer.backend_tokenizer
        specials = [("<s>", BOS), (EOS_TOKEN, EOS)]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
        folder = home / str(number)
        network.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS_TOKEN, bos_token="<s>").save_pretrained(
            folder
        )
        made[template] = str(folder)
    return made


def trainer_of(folder, **settings) -> PPOTrainer:
    return PPOTrainer(
        PPOConfig(folder, rewards=["ends_with_eos"], max_new_tokens=8, device="cpu", **settings)
    )


def rows_of(tokens) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)]


@pytest.mark.parametrize("template", ADDED)
def test_what_a_tokenizer_adds_is_known_and_nothing_of_it_follows_a_prompt(folders, template):
    tokenizer = load_tokenizer(folders[template])
    before, after = ADDED[template]
    assert added_ids(tokenizer) == (before, after)
    bare = tokenizer(["ab", "c"], add_special_tokens=False)["input_ids"]
    assert tokenizer(["ab", "c"])["input_ids"] == [[*before, *row, *after] for row in bare]
    assert encode_prompts(tokenizer, ["ab", "c"]) == [before + row for row in bare]


@pytest.mark.parametrize("template", ADDED)
def test_every_way_to_read_a_prompt_reads_the_same_ids(folders, template, tmp_path):
    """PPO, supervised and reward training, reward servers, pairs that came as dicts, values of texts,
    lengths of data."""
    trainer = trainer_of(folders[template])
    tokenizer, device = trainer.tokenizer, trainer.models.device
    before, _ = ADDED[template]
    expected = before + tokenizer("short", add_special_tokens=False)["input_ids"]
    assert rows_of(trainer.generator.read_prompts(["short"])) == [expected]
    assert encode(tokenizer, "short", "x") == (
        expected,
        tokenizer("x", add_special_tokens=False)["input_ids"] + [EOS],
    )
    assert rows_of(tokens_of(["short"], [[1]], [False], tokenizer, device)) == [expected]
    pairs = ensure_tokens(as_pairs([{"state": "short", "action": "x", "action_id": 1}]), tokenizer, device)
    assert rows_of(pairs.tokens) == [expected]
    with torch.no_grad():
        mask = torch.ones(1, len(expected), dtype=torch.bool)
        [value] = trainer.models.value.last_values(torch.tensor([expected]), mask).tolist()
    assert trainer.value_adder.add_values(["short"]) == [pytest.approx(value, abs=1e-6)]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "short"}) + "\n")
    assert check(str(tmp_path / "prompts.jsonl"), tokenizer).lengths[0].maximum == len(expected)


@pytest.mark.parametrize("template", [FIRST, BOTH])
def test_a_prompt_that_is_cut_keeps_its_bos_and_rewards_see_its_text_alone(folders, template):
    trainer = trainer_of(folders[template], truncate_prompts=True)
    text = "".join(f"{number:03d} " for number in range(40))
    tokens = trainer.generator.read_prompts(["short", text])
    cut = text[-(CONTEXT - 8 - 1) :]
    assert rows_of(tokens)[1] == [BOS, *trainer.tokenizer(cut, add_special_tokens=False)["input_ids"]]
    assert tokens.prompts[1] == cut
    assert tokens.truncated.tolist() == [False, True]
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        tokenize(["short"], trainer.tokenizer, CONTEXT, CONTEXT - 1, may_cut=True)


def test_a_bos_that_a_chat_template_wrote_is_kept_too(folders):
    trainer = trainer_of(folders[PLAIN], truncate_prompts=True)
    tokens = trainer.generator.read_prompts(["<s>" + "x" * 100])
    assert rows_of(tokens) == [[BOS, *trainer.tokenizer("x" * 55)["input_ids"]]]
    assert tokens.prompts == ["<s>" + "x" * 55]


@pytest.mark.parametrize("template", ADDED)
def test_a_chat_template_leaves_out_only_a_bos_that_the_tokenizer_adds(folders, template):
    tokenizer = load_tokenizer(folders[template])
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    written = ChatTemplate(tokenizer).prompt([{"role": "user", "content": "hi"}])
    assert written == ("hi" if ADDED[template][0] else "<s>hi")


def test_the_doctor_names_what_is_left_out_and_prompts_that_end_with_eos(folders, tmp_path):
    def found(template, *prompts):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        config = PPOConfig(
            folders[template], rewards=["ends_with_eos"], max_new_tokens=8, device="cpu", batch_size=1
        )
        return {item.name: item for item in examine(config, str(path), samples=1)}["prompt end"]

    assert found(FIRST, "short").text == "no prompt ends with EOS"
    assert (found(BOTH, "short").level, EOS_TOKEN in found(BOTH, "short").text) == ("ok", True)
    ended = found(FIRST, "short", "long" + EOS_TOKEN)
    assert (ended.level, ended.text.startswith("1 of 2 prompts end with")) == ("warn", True)
