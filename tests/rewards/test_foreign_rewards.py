"""Reward models of other people: they read the ids that were sampled, or a text that ends as those they
were trained on."""

import json
import logging
import os
import random
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import processors
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from proxima.base_setup import EMBEDDED
from proxima.base_setup.tokenizer_setup import load_tokenizer, same_tokenizer
from proxima.config import PPOConfig, RewardSpec
from proxima.core.episode import Episode
from proxima.core.types import Prompt
from proxima.evaluator.finished_run import evaluate_run
from proxima.evaluator.held_out import answer
from proxima.finetuning import read_preferences
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples
from proxima.rewards import model_reward as model
from proxima.rewards.endings import HOW, Ending, Readings, compare_endings
from proxima.rewards.http_reward import EndpointReward
from proxima.rewards.model_reward import ClassifierSource
from proxima.rewards.reward_samples import tokens_of
from proxima.rewards.reward_server import RewardServer, load_scorer
from proxima.runtime.distributed.process_group import Processes
from proxima.world.tiny_models import EOS_TOKEN, byte_tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PROXIMA_TRL_PYTHON") or str(ROOT / ".venv-trl" / "bin" / "python")
MANY = [f"prompt {i} " + "word " * (i % 5) for i in range(40)]
CPU = torch.device("cpu")
EXACT = 1e-5


def other_tokenizer(**special):
    """One token per byte too, but with other ids, and EOS is 0."""
    tokenizer = byte_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    size = len(state["model"]["vocab"])
    state["model"]["vocab"] = {token: size - 1 - i for token, i in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        added["id"] = size - 1 - added["id"]
    return type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)), **special
    )


def make_judge(folder, base, tokenizer=None, labels=1, **config):
    """A decoder with a score head of large random weights: what token it is read at decides the score."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
        nn.init.normal_(network.score.weight, std=0.1)
    for name, value in config.items():
        setattr(network.config, name, value)
    network.save_pretrained(folder)
    (tokenizer or AutoTokenizer.from_pretrained(base)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def same(tiny_folders, tmp_path_factory):
    """A classifier with the policy's tokenizer."""
    return make_judge(tmp_path_factory.mktemp("same") / "judge", tiny_folders["llama"])


@pytest.fixture(scope="module")
def other(tiny_folders, tmp_path_factory):
    """A classifier with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("other") / "judge"
    return make_judge(folder, tiny_folders["llama"], other_tokenizer(eos_token=EOS_TOKEN))


def test_an_adapter_of_a_classifier_is_refused_with_a_remedy_that_works(make_config, tiny, tmp_path):
    """As TRL saves a reward model that it trained with LoRA: PEFT's task type SEQ_CLS, no base weights."""
    judge = make_judge(tmp_path / "judge", tiny)
    network = AutoModelForSequenceClassification.from_pretrained(judge)
    adapted = get_peft_model(network, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="merge_and_unload"):
        PPOTrainer(make_config(rewards=str(tmp_path / "adapter")))
    shutil.copytree(judge, tmp_path / "merged")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    scores = [
        PPOTrainer(make_config(rewards=str(folder))).reward_computer.compute_rewards(["a"], ["b"])
        for folder in (judge, tmp_path / "merged")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)  # a new adapter changes nothing


def test_an_adapter_without_a_head_is_refused_with_the_command_that_makes_one(make_config, tmp_path):
    trainer = PPOTrainer(make_config())
    folder = trainer.models.policy.save(tmp_path / "policy")
    with pytest.raises(ValueError, match="proxima reward writes one"):
        PPOTrainer(make_config(rewards=str(folder)))


@torch.no_grad()
def direct(folder, rows):
    """Scores of rows of ids, each alone, without padding, read at its last token."""
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    hidden = [network.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
    return network.score(torch.stack(hidden))[:, 0].double()


def id_rows(tokens):
    return [ids[mask].tolist() for ids, mask in zip(tokens.input_ids, tokens.input_mask, strict=True)]


def rollout(make_config, **settings):
    """A trainer, and responses of letters: every second one ended, the others were cut."""
    trainer = PPOTrainer(make_config(**settings))
    chosen = random.Random(3)
    rows = [
        trainer.tokenizer("".join(chosen.choices(ascii_lowercase, k=1 + i % 7)))["input_ids"]
        for i in range(len(MANY))
    ]
    ended = [i % 2 == 0 for i in range(len(MANY))]
    rows = [
        [*row, trainer.tokenizer.eos_token_id] if end else row for row, end in zip(rows, ended, strict=True)
    ]
    return trainer, tokens_of(MANY, rows, ended, trainer.tokenizer, CPU)


def assert_close(scores, expected):
    torch.testing.assert_close(
        scores.double(), expected.double(), rtol=0, atol=EXACT * max(1.0, float(expected.abs().max()))
    )


# --- the policy's tokenizer: sampled ids ---


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}, {"engine": "plain"}], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_with_the_policys_tokenizer_the_sampled_ids_are_scored(
    make_config, tiny_folders, tmp_path, architecture, settings
):
    judge = make_judge(tmp_path / "judge", tiny_folders[architecture])
    trainer, tokens = rollout(make_config, rewards=judge, **settings)
    scores = trainer.reward_computer.score_tokens(tokens).total
    assert_close(scores, direct(judge, id_rows(tokens)))
    without = [
        row[:-1] if ended else row for row, ended in zip(id_rows(tokens), tokens.ended.tolist(), strict=True)
    ]
    gap = (scores - direct(judge, without)).abs()
    assert float(gap[tokens.ended].median()) > 0.1  # EOS decides the score, so that losing it would be seen
    assert float(gap[~tokens.ended].max()) <= EXACT * max(1.0, float(scores.abs().max()))
    leave = PPOTrainer(
        make_config(rewards=RewardSpec(judge, options={"eos": "leave"}), **settings)
    ).reward_computer
    assert_close(leave.score_tokens(tokens).total, direct(judge, without))


def test_ids_are_cut_on_the_left_after_bos_and_fail_where_they_do_not_fit(tiny_folders, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "~"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="~ $A", special_tokens=[("~", bos)]
    )
    judge = make_judge(tmp_path / "judge", tiny_folders["llama"], tokenizer)
    tokens = tokens_of(["x" * 100, "short"], [[10, 20, 256], [30, 256]], [True, True], tokenizer, CPU)
    source = ClassifierSource(judge, PPOConfig(), CPU, tokenizer, max_length=20)
    rows = id_rows(tokens)
    expected = [[bos, *rows[0][-19:]], rows[1]]
    assert rows[1][0] == bos
    assert_close(torch.tensor(source(Samples.of_tokens(tokens)).sequence), direct(judge, expected))
    long = tokens_of(["x" * 300, "short"], [[10], [30]], [False, False], tokenizer, CPU)
    scores = ClassifierSource(judge, PPOConfig(), CPU, tokenizer)(Samples.of_tokens(long)).sequence
    assert scores[0] != scores[0]
    assert_close(torch.tensor(scores[1:]), direct(judge, id_rows(long)[1:]))


def test_of_an_episode_the_eos_that_stands_there_is_dropped(same):
    """Whether it is done says nothing of its last token."""
    tokenizer = AutoTokenizer.from_pretrained(same)
    ids = [[10, 20], [30, tokenizer.eos_token_id]]
    tokens = tokens_of(["a", "b"], ids, [True, False], tokenizer, CPU)
    tokens = replace(tokens, episodes=[Episode(done=True), Episode()])
    source = ClassifierSource(same, PPOConfig(), CPU, tokenizer, eos="leave")
    done, cut = id_rows(tokens)
    assert_close(torch.tensor(source(Samples.of_tokens(tokens)).sequence), direct(same, [done, cut[:-1]]))


def test_tokenizers_are_told_apart_by_ids_and_not_by_their_pad_token(tiny, tmp_path):
    policy = load_tokenizer(tiny)
    assert policy.pad_token != policy.eos_token
    assert same_tokenizer(policy, byte_tokenizer())
    padded = byte_tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert same_tokenizer(policy, padded)
    ending = byte_tokenizer()
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, 256)]
    )
    assert ending("a")["input_ids"][-1] == 256
    assert same_tokenizer(policy, ending)
    judge = make_judge(tmp_path / "judge", tiny, ending)
    assert ClassifierSource(judge, PPOConfig(), CPU, policy).ending.how == "append"  # and a sampled EOS stays
    assert not same_tokenizer(policy, other_tokenizer(eos_token=EOS_TOKEN))
    ends_elsewhere = byte_tokenizer()
    ends_elsewhere.add_special_tokens({"eos_token": "!"})
    assert not same_tokenizer(policy, ends_elsewhere)
    more = byte_tokenizer()
    more.add_tokens(["word"])
    assert not same_tokenizer(policy, more)
    from tokenizers import normalizers

    for normal in (normalizers.Lowercase(), normalizers.NFKC(), normalizers.Strip()):
        changed = byte_tokenizer()
        changed.backend_tokenizer.normalizer = normal
        assert not same_tokenizer(policy, changed)


def test_a_model_that_pads_with_eos_is_read_before_it_as_transformers_does(
    make_config, tiny_folders, tmp_path
):
    """`transformers` looks for the last token that is not the pad token: such a model was trained at the
    token before EOS."""
    judge = make_judge(tmp_path / "judge", tiny_folders["llama"], pad_token_id=256)
    trainer, tokens = rollout(make_config, rewards=judge)
    network = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    rows = id_rows(tokens)
    with torch.no_grad():
        theirs = torch.stack([network(input_ids=torch.tensor([row])).logits[0, 0] for row in rows])
    assert_close(trainer.reward_computer.score_tokens(tokens).total, theirs)
    told = PPOTrainer(make_config(rewards=RewardSpec(judge, options={"eos": "append"}))).reward_computer
    assert_close(told.score_tokens(tokens).total, direct(judge, rows))


def test_an_encoder_is_read_by_its_own_forward_pass(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_labels": 1,
    }
    network = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **shape)
    )
    network.eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    source = ClassifierSource(str(tmp_path), PPOConfig(), CPU, tokenizer, eos="leave")
    assert source.classifier.decoder is None
    scores = source(Samples.of_texts(["a", "longer than that"], ["b", "c"], tokenizer)).sequence
    with torch.no_grad():
        alone = [
            network(**tokenizer(text, return_tensors="pt")).logits[0, 0]
            for text in ("ab", "longer than thatc")
        ]
    assert_close(torch.tensor(scores), torch.stack(alone))


# --- another tokenizer: text, and how it ends ---


def written(samples, tokenizer, how):
    rows = tokenizer(samples.full_texts)["input_ids"]
    return [
        [*row, tokenizer.eos_token_id] if ended and how == "append" else row
        for row, ended in zip(rows, samples.ended, strict=True)
    ]


@pytest.mark.parametrize("how", ["append", "leave"])
def test_with_another_tokenizer_a_finished_text_ends_as_the_option_says(make_config, other, how):
    trainer, tokens = rollout(make_config, rewards=RewardSpec(other, options={"eos": how}))
    tokenizer, samples = AutoTokenizer.from_pretrained(other), Samples.of_tokens(tokens)
    rows = written(samples, tokenizer, how)
    assert {row[-1] == 0 for row, ended in zip(rows, samples.ended, strict=True) if ended} == {
        how == "append"
    }
    assert not any(
        row[-1] == 0 for row, ended in zip(rows, samples.ended, strict=True) if not ended
    )  # cut: no EOS
    assert_close(trainer.reward_computer.score_tokens(tokens).total, direct(other, rows))


def test_texts_that_nobody_sampled_count_as_finished(make_config, same, other, tiny):
    for judge in (same, other):
        computer = PPOTrainer(
            make_config(rewards=RewardSpec(judge, options={"eos": "append"}))
        ).reward_computer
        tokenizer = AutoTokenizer.from_pretrained(judge)
        rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in ("Why? Because.", "x")]
        expected = direct(judge, rows).tolist()
        assert computer.compute_rewards(["Why?", "x"], [" Because.", ""]) == pytest.approx(expected, abs=1e-4)
        assert computer.compute_rewards(["Why? Because.", "x"]) == pytest.approx(expected, abs=1e-4)


def test_a_reward_model_of_this_package_reads_texts_with_eos_as_it_was_trained(make_config, tmp_path):
    from tests.helpers import shake

    shake(PPOTrainer(make_config()), seed=11).models.value.save(tmp_path / "reward")
    trainer, tokens = rollout(make_config, rewards=str(tmp_path / "reward"))
    scores = trainer.reward_computer.compute_rewards(MANY, tokens.texts())
    expected = trainer.reward_computer.score_tokens(tokens).total
    assert_close(torch.tensor(scores)[tokens.ended.tolist()], expected[tokens.ended.tolist()])


def test_an_option_that_makes_no_sense_is_refused(other, tiny_folders, tmp_path):
    with pytest.raises(ValueError, match=r"eos .'always'. of reward .* must be one of auto, append, leave"):
        ClassifierSource(other, PPOConfig(), CPU, eos="always")
    bare = make_judge(tmp_path / "judge", tiny_folders["llama"], other_tokenizer())
    with pytest.raises(ValueError, match="has no EOS token to append"):
        ClassifierSource(bare, PPOConfig(), CPU, eos="append")


def write_training_arguments(folder, module):
    with zipfile.ZipFile(Path(folder) / "training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", b"\x80\x02c" + module + b"\nq\x00)\x81q\x01.")


def trained_by_trl(folder, tokenizer):
    write_training_arguments(folder, b"trl.trainer.reward_config\nRewardConfig")


def trained_by_a_plain_trainer(folder, tokenizer):
    write_training_arguments(folder, b"transformers.training_args\nTrainingArguments")


def model_card(folder, tokenizer):
    (Path(folder) / "README.md").write_text("---\ntags:\n- trl\n- reward-trainer\n---\n# judge\n")


def report(folder, tokenizer):
    (Path(folder) / "reward.json").write_text('{"accuracy": 0.9, "eos": "leave"}')


def broken_records(folder, tokenizer):
    (Path(folder) / "reward.json").write_text('{"eos": "sometimes"')
    (Path(folder) / "training_args.bin").write_bytes(b"PK\x03\x04 not a zip")


def by_openrlhf(folder, tokenizer):
    path = Path(folder) / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"architectures": ["RewardModel"], "normalize_reward": False}
        )
    )


def template_with_eos(folder, tokenizer):
    tokenizer.chat_template = (
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{{ eos_token }}\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)


def template_without(folder, tokenizer):
    tokenizer.chat_template = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)


def tokenizer_that_ends(folder, tokenizer):
    ended = processors.TemplateProcessing(single=f"$A {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, 0)])
    tokenizer.backend_tokenizer.post_processor = ended
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("record", "how", "why"),
    [
        (trained_by_trl, "append", "TRL"),
        (model_card, "append", "TRL"),
        (by_openrlhf, "append", "OpenRLHF"),
        (report, "leave", "reward.json"),
        (template_with_eos, "append", "chat template ends an answer with EOS"),
        (tokenizer_that_ends, "append", "its tokenizer ends every text with EOS"),
        (trained_by_a_plain_trainer, None, ""),
        (template_without, None, ""),
        (broken_records, None, ""),
    ],
)
def test_what_a_checkpoint_records_of_its_training_decides(tiny_folders, tmp_path, tiny, record, how, why):
    tokenizer = other_tokenizer(eos_token=EOS_TOKEN)
    judge = make_judge(tmp_path / "judge", tiny_folders["llama"], tokenizer)
    record(judge, tokenizer)
    source = ClassifierSource(judge, PPOConfig(), CPU, load_tokenizer(tiny))
    assert not source.reads_ids
    if how is None:
        assert source.ending is None
        return
    assert source.ending.how == how
    assert why in source.ending.why
    for ended in (True, False):
        samples = Samples(["ab"], ["c"], [[]], [ended])
        [row] = source._text_rows(samples, how)
        assert row.count(0) == (ended and how == "append")
        assert (row[-1] == 0) == (ended and how == "append")


def test_a_classifier_without_a_tokenizer_is_refused(tiny_folders, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(tiny_folders["llama"], num_labels=1).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="there is no tokenizer beside the classifier"):
        ClassifierSource(str(tmp_path), PPOConfig(), CPU)


def test_a_chat_template_writes_the_end_itself(tiny_folders, tmp_path, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["llama"])
    tokenizer.chat_template = (
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{{ eos_token }}{% endfor %}"
    )
    judge = make_judge(tmp_path / "judge", tiny_folders["llama"], tokenizer)
    source = ClassifierSource(judge, PPOConfig(), CPU, load_tokenizer(tiny), chat=True)
    assert not source.reads_ids
    [row] = source._text_rows(Samples.of_texts(["ask"], ["answer"], tokenizer), source.ending.how)
    assert tokenizer.decode(row) == f"<user>ask{EOS_TOKEN}<assistant>answer{EOS_TOKEN}"


# --- nothing is recorded: scores are compared ---


def made_up(shares, count=32, columns=()):
    """Samples, and a model whose last hidden states vary along its head's weight by so much under each ending,
    and by 1 along each of 31 other directions; `chosen` scores above `rejected` with EOS only."""
    prompts = [Prompt(f"p{i}", dict.fromkeys(columns, f"answer {i}") | {"number": i}) for i in range(count)]
    samples = Samples(prompts, ["c"] * count, [[1]] * count, [False] * count)
    states = torch.randn(2, count, 32, generator=torch.Generator().manual_seed(5))

    def read(given, how):
        rows = [int(prompt.columns["number"]) for prompt in given.prompts]
        hidden = states[HOW.index(how)][rows] * torch.tensor([shares[how] ** 0.5, *[1.0] * 31])
        good = (given.completions == ["good"] * len(given)) * (1.0 if how == "append" else -1.0)
        return Readings(hidden[:, 0] + good, hidden, torch.eye(32)[0])

    return read, samples


@pytest.mark.parametrize(
    ("shares", "count", "how", "guess"),
    [
        ({"append": 40.0, "leave": 1.0}, 32, "append", False),
        ({"append": 1.0, "leave": 40.0}, 32, "leave", False),
        ({"append": 1.0, "leave": 1.0}, 32, "append", True),  # no direction of its own at either
        ({"append": 0.05, "leave": 1.0}, 32, "append", True),  # a wider spread alone says nothing
        ({"append": 40.0, "leave": 40.0}, 32, "append", True),  # separated at both
        ({"append": 1.0, "leave": 40.0}, 4, "append", True),  # too few
        ({"append": float("nan"), "leave": 40.0}, 32, "append", True),
        ({"append": 0.0, "leave": 0.0}, 32, "append", True),
    ],
)
def test_without_a_record_the_ending_at_which_the_score_separates_samples_is_taken(shares, count, how, guess):
    ending = compare_endings(*made_up(shares, count))
    assert (ending.how, ending.is_guess) == (how, guess)


def test_a_network_whose_hidden_states_are_unknown_is_a_guess():
    read, samples = made_up({"append": 1.0, "leave": 40.0})
    assert compare_endings(lambda given, how: Readings(read(given, how).scores), samples).is_guess


def test_preferences_that_prompts_carry_decide_before_any_spread():
    read, samples = made_up({"append": 1.0, "leave": 40.0})
    for chosen, how in (("good", "append"), ("bad", "leave")):
        pair = {"chosen": chosen, "rejected": "bad" if chosen == "good" else "good"}
        prompts = [Prompt(prompt, prompt.columns | pair) for prompt in samples.prompts]
        ending = compare_endings(read, replace(samples, prompts=prompts))
        assert ending.how == how
        assert "32 held-out preferences" in ending.why


def test_preferences_in_an_order_by_chance_decide_nothing():
    _, samples = made_up({"append": 1.0, "leave": 1.0})
    prompts = [
        Prompt(prompt, prompt.columns | {"chosen": "a", "rejected": "b"}) for prompt in samples.prompts
    ]
    noise = torch.randn(2, 2, len(samples), generator=torch.Generator().manual_seed(9))

    def read(given, how):
        return Readings(noise[HOW.index(how), int(given.completions[0] == "a")])

    assert compare_endings(read, replace(samples, prompts=prompts)).is_guess


class Judge:
    """The shipped language model as a classifier, trained on texts that end with EOS, or that do not."""

    def __init__(self, how, seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = AutoModelForSequenceClassification.from_pretrained(EMBEDDED, num_labels=1)
        self.tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
        self.pairs, self.held_out = (
            list(read_preferences(EMBEDDED / f"preferences_{part}.jsonl.gz")) for part in ("train", "eval")
        )
        if how is not None:
            self.train(how, random.Random(seed))

    def hidden(self, texts, how):
        end = [self.tokenizer.eos_token_id] if how == "append" else []
        rows = [torch.tensor(self.tokenizer(text)["input_ids"] + end) for text in texts]
        ids, sizes = nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([*map(len, rows)])
        mask = torch.arange(ids.shape[1]) < sizes.unsqueeze(1)
        states = self.network.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return states[torch.arange(len(rows)), sizes - 1]

    def train(self, how, chosen):
        optimizer = torch.optim.Adam(self.network.parameters(), lr=3e-4)
        for _ in range(30):
            pairs = chosen.sample(self.pairs, 16)
            texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
            better, worse = self.network.score(self.hidden(texts, how)).chunk(2)
            optimizer.zero_grad()
            nn.functional.softplus(worse - better).mean().backward()
            optimizer.step()

    @torch.no_grad()
    def read(self, samples, how):
        hidden, weight = self.hidden(samples.completions, how), self.network.score.weight[0]
        return Readings(hidden @ weight, hidden, weight)

    def ending(self):
        texts = [pair.chosen if i % 2 else pair.rejected for i, pair in enumerate(self.held_out[:64])]
        return compare_endings(self.read, Samples([""] * 64, texts, [[]] * 64, [True] * 64))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_classifier_trained_with_eos_or_without_is_recognised_by_how_it_reads(seed):
    for how in HOW:
        ending = Judge(how, seed).ending()
        assert (ending.how, ending.is_guess) == (how, False), ending


def test_a_classifier_that_was_never_trained_is_a_guess():
    for seed in range(8):
        assert Judge(None, seed).ending().is_guess


def decided(read, samples):
    return Ending("leave", f"{len(samples)} compared")


def undecided(read, samples):
    return Ending("append", f"{len(samples)} compared", is_guess=True)


def test_few_samples_settle_nothing_and_are_kept_until_there_are_enough(
    other, caplog, tiny, monkeypatch, make_config
):
    source = ClassifierSource(other, PPOConfig(), CPU, load_tokenizer(tiny))
    monkeypatch.setattr(model, "compare_endings", decided)
    few = Samples.of_texts(["Why?"] * 5, ["Because."] * 5, source.classifier.tokenizer)
    with caplog.at_level(logging.INFO, "proxima.rewards.model_reward"):
        first = source(few).sequence
        assert source.ending is None
        assert source.ending_now.is_guess
        assert source.state() is None
        then = source(few).sequence
        source(few)
    assert source.ending == Ending("leave", "10 compared")
    assert first != then  # with EOS, then without
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_samples_that_do_not_tell_are_joined_by_more(other, tiny, monkeypatch):
    source = ClassifierSource(other, PPOConfig(), CPU, load_tokenizer(tiny))
    compared = []
    monkeypatch.setattr(model, "compare_endings", lambda *a: compared.append(len(a[1])) or undecided(*a))
    one = Samples.of_texts(["Why?"] * 8, ["Because."] * 8, source.classifier.tokenizer)
    for _ in range(12):
        source(one)
    assert compared == [8, 16, 32, 64]
    assert source.ending == Ending("append", "64 compared", is_guess=True)  # from then on it stays a guess
    again = ClassifierSource(other, PPOConfig(), CPU, load_tokenizer(tiny))
    again.restore(json.loads(json.dumps(source.state())))
    assert again.ending == source.ending


def test_training_settles_before_the_first_step_on_held_out_prompts(make_config, other, monkeypatch):
    settings = {"batch_size": 2, "ppo_epochs": 1}
    for held_out, judges, asked in (
        (["held out", "out"], (other,), {"held out", "out"}),
        (None, (), {"a", "b"}),
    ):
        seen = []
        monkeypatch.setattr(
            model, "compare_endings", lambda *a, seen=seen: seen.append(a[1]) or undecided(*a)
        )
        trainer = PPOTrainer(make_config(**settings, rewards=other, judges=judges))
        trainer.train(["a", "b"], 1, held_out)
        assert [len(samples) for samples in seen] == [64] * (1 + len(judges))
        assert all(set(samples.prompts) == asked for samples in seen)
        [source] = trainer.reward_computer.classifiers.values()
        assert source.ending.is_guess


def test_the_choice_is_made_once_and_said(make_config, other, caplog, monkeypatch):
    monkeypatch.setattr(model, "compare_endings", decided)
    trainer, tokens = rollout(make_config, rewards=other)
    [source] = trainer.reward_computer.classifiers.values()
    assert source.ending is None
    with caplog.at_level(logging.INFO, "proxima.rewards.model_reward"):
        first = trainer.reward_computer.score_tokens(tokens).total
        chosen = source.ending
        trainer.reward_computer.score_tokens(tokens)
    assert [record.getMessage() for record in caplog.records] == [f"reward {other} reads the text; {chosen}"]
    samples = Samples.of_tokens(tokens)
    assert_close(first, direct(other, written(samples, AutoTokenizer.from_pretrained(other), chosen.how)))


def test_all_processes_end_texts_as_the_main_process_chose(make_config, other):
    """Scoring on process 1 of 2: it takes what the main process says and compares nothing."""
    trainer, tokens = rollout(make_config, rewards=other)
    [source] = trainer.reward_computer.classifiers.values()

    class Second(Processes):
        def on_main(self, work):
            return {"source": other, "how": "leave", "why": "the first one said so"}

    trainer.models.processes = Second(rank=1, world_size=2)
    trainer.reward_computer.settle(Samples.of_tokens(tokens))
    assert source.ending == Ending("leave", "the first one said so")


# --- one choice for a whole run ---


def flip(monkeypatch, how):
    monkeypatch.setattr(model, "compare_endings", lambda score, samples: Ending(how, "compared"))


@pytest.mark.parametrize("place", ["rewards", "judges"])
def test_a_resumed_run_keeps_its_choice(make_config, other, monkeypatch, place):
    settings = {"run_name": "run", "batch_size": 2, "ppo_epochs": 1, "checkpoint_every": 1, place: (other,)}
    prompts, held_out = ["a", "b", "c", "d"], ["held out"]
    flip(monkeypatch, "leave")
    PPOTrainer(make_config(**settings)).train(prompts, 1, held_out)
    flip(monkeypatch, "append")
    for more, how in (({}, "leave"), ({place: (RewardSpec(other, options={"eos": "append"}),)}, "append")):
        resumed = PPOTrainer(make_config(**{**settings, **more}))
        resumed.train(prompts, 2, held_out, resume=True, force=True)
        computer = resumed.reward_computer if place == "rewards" else resumed.judges.scoring["judge"]
        assert computer.classifiers["judge"].ending.how == how


def test_eval_keeps_the_choice_of_the_run(make_config, other, tmp_path, monkeypatch, tiny_folders):
    flip(monkeypatch, "leave")
    results = PPOTrainer(make_config(run_name="run", batch_size=2, ppo_epochs=1, rewards=(other,))).train(
        ["a", "b"]
    )
    flip(monkeypatch, "append")
    seen = []
    real = ClassifierSource.__call__
    monkeypatch.setattr(
        ClassifierSource,
        "__call__",
        lambda self, s: (real(self, s), seen.append(self.ending_now.how))[0],
    )
    evaluate_run(results.run_folder, ["x", "y"])
    assert set(seen) == {"leave"}
    path = results.run_folder / "results.json"
    for endings in (
        "nonsense",
        {"rewards": [1]},
        {"rewards": {"judge": {"source": other, "how": 5}}},
        {"rewards": {"judge": {}}},
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"endings": endings}))
        seen.clear()
        evaluate_run(results.run_folder, ["x", "y"])
        assert set(seen) == {"append"}


def test_judges_and_validation_score_as_the_reward_does(make_config, same):
    trainer, tokens = rollout(make_config, rewards=same, judges=(same,))
    samples = Samples.of_tokens(tokens)
    expected = direct(same, id_rows(tokens))
    assert_close(torch.tensor(trainer.judges.score(samples)["judge"]), expected)
    answers = answer(trainer, MANY)
    assert answers.scores["judge"] == pytest.approx(answers.scores[""], abs=1e-6)


# --- over HTTP ---


@pytest.fixture
def serve(monkeypatch):
    """Gives `EndpointReward` a server in this process, and the requests that it got."""
    from fastapi.testclient import TestClient

    def start(config, **options):
        server = RewardServer("judge", lambda: load_scorer(config))
        server._scorer = server._load()
        client, requests = TestClient(server.app(), "http://127.0.0.1"), []

        async def post(self, _, body):
            requests.append(json.loads(body))
            reply = client.post("/score", content=body, headers=self._headers())
            assert reply.status_code == 200, reply.text
            return reply.content

        monkeypatch.setattr(EndpointReward, "_post", post)
        return EndpointReward("http://127.0.0.1:1/score", **options), requests

    return start


@pytest.mark.parametrize("send_ids", [True, False])
@pytest.mark.parametrize("which", ["same", "other"])
def test_a_served_classifier_scores_as_in_the_run(make_config, serve, request, which, send_ids):
    judge = RewardSpec(request.getfixturevalue(which), options={"eos": "append"})
    trainer, tokens = rollout(make_config, rewards=judge)
    client, requests = serve(PPOConfig(rewards=(judge,)), send_ids=send_ids)
    samples = Samples.of_tokens(tokens)
    assert_close(torch.tensor(client(samples).sequence), trainer.reward_computer.score_tokens(tokens).total)
    assert [flag for body in requests for flag in body["ended"]] == samples.ended
    assert ("completion_ids" in requests[0]) == send_ids


def test_the_server_says_how_texts_end_and_settles_on_enough_samples(other, monkeypatch):
    monkeypatch.setattr(model, "compare_endings", decided)
    said = []
    score = load_scorer(PPOConfig(rewards=(other,)), said.append)
    request = {"prompts": ["Why?"] * 4, "completions": [" Because."] * 4}
    score(request)
    assert len(said) == 1
    assert "a guess until more samples" in said[0]
    score(request)
    score(request)
    assert said[1:] == ["no EOS is added: 8 compared; start with eos=leave to keep this"]
    told = []
    load_scorer(PPOConfig(rewards=(RewardSpec(other, options={"eos": "append"}),)), told.append)
    assert told == ["EOS ends a finished response: the option says so"]


def test_a_served_reward_model_of_this_package_sees_eos_without_ids_too(make_config, serve, tmp_path, tiny):
    from tests.helpers import shake

    shake(PPOTrainer(make_config()), seed=11).models.value.save(tmp_path / "reward")
    reward = str(tmp_path / "reward")
    trainer, tokens = rollout(make_config, rewards=reward)
    client, _ = serve(PPOConfig(model_name=tiny, rewards=(reward,)))
    assert_close(
        torch.tensor(client(Samples.of_tokens(tokens)).sequence),
        trainer.reward_computer.score_tokens(tokens).total,
    )


# --- TRL, and value models ---


GET_REWARD = """
import json, sys
import torch
torch.set_num_threads(1)
from transformers import AutoModelForSequenceClassification
from trl.experimental.utils import get_reward
given = json.load(open(sys.argv[1]))
network = AutoModelForSequenceClassification.from_pretrained(given["folder"]).eval()
with torch.no_grad():
    logits, rewards, _ = get_reward(network, torch.tensor(given["ids"]), given["pad"], given["context"])
json.dump({"logits": logits[:, :, 0].tolist(), "rewards": rewards.tolist()}, open(sys.argv[2], "w"))
"""


def rewards_of_trl(given, tmp_path):
    (tmp_path / "given.json").write_text(json.dumps(given))
    paths = [str(tmp_path / "given.json"), str(tmp_path / "found.json")]
    done = subprocess.run(
        [PYTHON, "-c", GET_REWARD, *paths], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    return torch.tensor(found["logits"]), torch.tensor(found["rewards"])


@torch.no_grad()
def rewards_by_formula(given, tmp_path):
    """What `get_reward` of TRL 1.12 computes: padding masked by its id, the last token before it in the
    response read."""
    network = AutoModelForSequenceClassification.from_pretrained(given["folder"]).eval()
    ids = torch.tensor(given["ids"])
    mask = ids != given["pad"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {
        "input_ids": ids.masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "position_ids": positions,
    }
    logits = network.score(network.base_model(**inputs).last_hidden_state)[:, :, 0]
    real = mask[:, given["context"] :]
    last = given["context"] - 1 + real.long().cumprod(1).sum(1)
    return logits, logits[torch.arange(len(ids)), last]


BY_TRL = pytest.param(
    rewards_of_trl,
    id="trl",
    marks=pytest.mark.skipif(
        not Path(PYTHON).exists(), reason="TRL 1.12 is not here: `make peer` makes .venv-trl"
    ),
)


@pytest.mark.parametrize("pads_with_eos", [False, True])
@pytest.mark.parametrize("get_reward", [pytest.param(rewards_by_formula, id="formula"), BY_TRL])
def test_rewards_and_values_are_those_of_trl(make_config, tiny_folders, tmp_path, get_reward, pads_with_eos):
    pad = 256 if pads_with_eos else 5  # a byte that no text here has
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders["qwen3"])
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    judge = make_judge(tmp_path / "judge", tiny_folders["qwen3"], tokenizer, pad_token_id=pad)
    trainer, tokens = rollout(make_config, rewards=judge, value_model=judge)
    ids = tokens.input_ids.masked_fill(~tokens.input_mask, pad)
    context = tokens.prompt_ids.shape[1]
    given = {"folder": judge, "ids": ids.tolist(), "pad": pad, "context": context}
    logits, rewards = get_reward(given, tmp_path)
    assert_close(trainer.reward_computer.score_tokens(tokens).total, rewards)
    with torch.no_grad():
        values = trainer.models.value.response_values(tokens)
    assert_close(values[tokens.mask], logits[:, context - 1 : -1][tokens.mask])


def test_a_value_model_takes_the_score_head_whatever_the_checkpoint_calls_itself(
    make_config, tiny_folders, tmp_path
):
    judge = make_judge(tmp_path / "judge", tiny_folders["llama"])
    by_openrlhf(judge, None)
    trainer, tokens = rollout(make_config, value_model=judge)
    with torch.no_grad():
        values = trainer.models.value.response_values(tokens)
    rows = [row[: int(p) + 1] for row, p in zip(id_rows(tokens), tokens.prompt_sizes, strict=True)]
    assert_close(values[tokens.sizes > 1, 1], direct(judge, rows)[tokens.sizes > 1])
    with pytest.warns(UserWarning, match="untrained"):
        ClassifierSource(tiny_folders["llama"], PPOConfig(), CPU)  # a causal LM has no such head


def test_a_value_model_with_another_vocabulary_is_refused(make_config, other):
    with pytest.raises(ValueError, match=r"value_model .* has another vocabulary than the policy"):
        PPOTrainer(make_config(value_model=other))
