"""State-action pairs: columns that read as dicts, plain dicts that become columns."""

import dataclasses

import numpy
import pandas
import pytest
import torch

from proxima.base_setup.tokenizer_setup import load_tokenizer
from proxima.core.pairs import SAPairs, TokenPairs, as_pairs, rejoin
from proxima.core.pairs.sa_pairs import ADDED_BY
from proxima.core.types import TokenColumns, Tokens
from proxima.token_attribution.sa_pair_builder import ensure_tokens


@pytest.fixture(scope="module")
def tokenizer(tiny_folders):
    return load_tokenizer(tiny_folders["qwen3"])


def make_pairs(tokenizer, texts=("abc", "de"), prompts=("Hi", "You"), **columns):
    """Pairs of these responses; the numbers count up from 0."""
    rows = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, rows))
    mask = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    given = tokenizer(list(prompts), return_tensors="pt", padding=True)
    flags = torch.zeros(len(rows), dtype=torch.bool)
    tokens = Tokens(
        prompts=list(prompts),
        prompt_ids=given["input_ids"],
        prompt_mask=given["attention_mask"].bool(),
        response_ids=ids,
        mask=mask,
        ended=flags,
        truncated=flags,
        keys=torch.arange(len(rows)),
        tokenizer=tokenizer,
    )
    numbers = torch.arange(mask.numel(), dtype=torch.float32).view(mask.shape)
    given = {"logprob_policy": -numbers, "logprob_ref": -2 * numbers, **columns}
    return TokenPairs(TokenColumns(tokens, given))


def test_pairs_read_as_dicts_one_a_real_token(tokenizer):
    pairs = make_pairs(tokenizer)
    assert len(pairs) == 5
    assert dict(pairs[1]) == {
        "state": "Hia",
        "action": "b",
        "logprob_policy": -1.0,
        "logprob_ref": -2.0,
        "sequence": 0,
        "position": 1,
        "action_id": tokenizer("b")["input_ids"][0],
    }
    assert [pair["state"] + pair["action"] for pair in pairs[3:]] == ["Youd", "Youde"]
    assert dict(pairs[-1]) == dict(pairs[4])
    with pytest.raises(IndexError, match="pair 5 of 5"):
        pairs[5]
    with pytest.raises(KeyError):
        pairs[0]["kl"]


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def decode(self, *arguments, **options):
        self.calls += 1
        return self.tokenizer.decode(*arguments, **options)


def counted_pairs(tokenizer):
    counting, pairs = Counting(tokenizer), make_pairs(tokenizer)
    tokens = dataclasses.replace(pairs.tokens, tokenizer=counting)
    return counting, TokenPairs(TokenColumns(tokens, pairs.columns))


def test_a_rollout_and_its_pairs_are_two_views_of_one_storage(tokenizer):
    pairs = make_pairs(tokenizer).with_columns(kl=torch.ones(2, 3))
    rollout = pairs.rollout
    assert (len(rollout), len(pairs)) == (2, 5)  # sequences, and tokens
    assert rollout.storage is pairs.storage
    assert rollout.columns["kl"] is pairs.column("kl")
    assert rollout[1].tokens.texts() == ["de"]
    assert rollout.logprobs == [[0, -1, -2], [-3, -4]]
    more = pairs.with_columns(reward=torch.zeros(2, 3))
    assert more.tokens is pairs.tokens
    assert "reward" not in pairs.columns


def test_a_batch_is_decoded_once_whatever_reads_its_texts(tokenizer):
    counting, pairs = counted_pairs(tokenizer)
    texts = pairs.tokens.texts()
    assert counting.calls == len(texts) == 2
    texts[0] = "changed"
    later = pairs.with_columns(kl=torch.ones(2, 3))
    assert later.tokens.texts() == later.rollout.tokens.texts() == ["abc", "de"]
    assert later.select(torch.tensor([1])).tokens.texts() == ["de"]
    assert later.select(torch.tensor([1, 0])).select(torch.tensor([1])).tokens.texts() == ["abc"]
    assert counting.calls == 2
    assert pairs.tokens.texts(special=True) == ["abc", "de"]
    assert counting.calls == 4  # with special tokens the texts are others


def test_plain_dicts_of_a_phase_get_the_tokens_of_their_rollout(tokenizer):
    pairs = make_pairs(tokenizer)
    dicts = [{**pair, "kl": 1.0 + i} for i, pair in enumerate(pairs)]
    joined = rejoin(dicts, pairs)
    assert isinstance(joined, TokenPairs)
    assert joined.tokens is pairs.tokens
    assert joined.column("kl")[joined.mask].tolist() == [1, 2, 3, 4, 5]
    assert rejoin(pairs, pairs) is pairs
    with pytest.raises(ValueError, match="a phase returned 4 pairs that are not the 5 it was given"):
        rejoin(dicts[:-1], pairs)


def test_pairs_with_and_without_token_ids_are_not_joined(tokenizer):
    pairs = make_pairs(tokenizer)
    with pytest.raises(ValueError, match="with and without token ids"):
        SAPairs.cat([pairs, as_pairs(pairs.to_dicts())])


def test_text_is_decoded_only_when_asked_for(tokenizer):
    counting, pairs = counted_pairs(tokenizer)
    assert [pair["logprob_policy"] for pair in pairs] == [0, -1, -2, -3, -4]
    assert counting.calls == 0
    assert pairs[0]["action"] == "a"
    calls = counting.calls
    assert 0 < calls <= 6  # two per token of the first sequence
    assert pairs[2]["state"] == "Hiab"
    assert counting.calls == calls  # and only once


@pytest.mark.parametrize("text", ["é", "a€b", "😀é", "日本"])
def test_characters_split_over_tokens_belong_to_the_token_that_ends_them(tokenizer, text):
    pairs = make_pairs(tokenizer, (text, "de"))
    own = [pair for pair in pairs if pair["sequence"] == 0]
    assert len(own) == len(text.encode())
    assert "".join(pair["action"] for pair in own) == text
    assert not any("\ufffd" in pair["state"] for pair in own)
    assert [pair["state"] for pair in own[1:]] == [pair["state"] + pair["action"] for pair in own[:-1]]


def test_dicts_frames_and_parquet_files_give_the_same_pairs_back(tokenizer, tmp_path):
    pairs = make_pairs(tokenizer)
    pairs.to_parquet(tmp_path / "pairs.parquet")
    frame = pandas.read_parquet(tmp_path / "pairs.parquet")
    pandas.testing.assert_frame_equal(frame, pairs.to_pandas())
    for dicts in (pairs.to_dicts(), frame.to_dict("records")):
        again = as_pairs(dicts)
        assert again.to_dicts() == pairs.to_dicts()
        assert torch.equal(again.mask, pairs.mask)
        assert torch.equal(again.column("logprob_ref").float(), pairs.column("logprob_ref") * pairs.mask)
        full = ensure_tokens(again, tokenizer, torch.device("cpu"))
        assert full.to_dicts() == pairs.to_dicts()


def test_select_cuts_to_the_longest_chosen_and_cat_puts_it_back(tokenizer):
    pairs = make_pairs(tokenizer, ("abc", "de", "f"), ("Hi", "You", "Prompt"))
    short = pairs.select(torch.tensor([2, 1]))
    assert short.mask.tolist() == [[True, False], [True, True]]
    assert [(pair["state"], pair["action"]) for pair in short] == [
        ("Prompt", "f"),
        ("You", "d"),
        ("Youd", "e"),
    ]
    assert short.select(torch.tensor([1])).tokens.prompt_ids.shape == (1, 3)
    joined = SAPairs.cat([pairs.select(torch.tensor([0])), pairs.select(torch.tensor([1, 2]))])
    assert joined.to_dicts() == pairs.to_dicts()


def test_cat_refuses_groups_with_different_columns(tokenizer):
    bare, richer = make_pairs(tokenizer), make_pairs(tokenizer, kl=torch.zeros(2, 3))
    for parts in ([richer, bare], [bare, richer]):
        with pytest.raises(ValueError, match="kl"):
            SAPairs.cat(parts)


@pytest.mark.parametrize("name", ADDED_BY)
def test_a_missing_column_names_the_stage_that_adds_it(name):
    pairs = as_pairs([{"state": "a", "action": "b"}])
    with pytest.raises(ValueError, match=name) as problem:
        pairs.column(name)
    assert ADDED_BY[name] in str(problem.value)


def test_a_column_of_another_shape_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"'kl' has shape \(2, 2\), the mask \(2, 3\)"):
        make_pairs(tokenizer).with_columns(kl=torch.zeros(2, 2))


A, B = {"state": "x", "action": "y"}, {"state": "xy", "action": "z"}


@pytest.mark.parametrize(
    ("dicts", "message"),
    [
        ([], "no state-action pairs"),
        ([{**A, "kl": 1.0}, B], "pair 1 has no 'kl'"),
        ([{**A, "kl": None}, {**B, "kl": 1.0}], "pair 0 has no 'kl'"),
        ([{**A, "sequence": 0}, B], "pair 1 has no 'sequence'"),
        ([{**A, "sequence": 0, "position": 0}, {**B, "sequence": 0}], "pair 1 has no 'position'"),
        (
            [{**A, "sequence": 0, "position": 0}, {**B, "sequence": 0, "position": 0}],
            "two pairs at one position",
        ),
        ([{"action": "y"}], "pair 0 has neither 'sequence' nor a text 'state'"),
    ],
)
def test_plain_dicts_that_do_not_fit_together_are_refused(dicts, message):
    with pytest.raises(ValueError, match=message):
        as_pairs(dicts)


def test_a_new_sequence_starts_where_the_state_does_not_extend_the_last():
    states = ["a", "ab", "abc", "a", "b", "ba"]
    pairs = as_pairs([{"state": state, "action": "?"} for state in states])
    assert pairs.cells.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1]]


@pytest.mark.parametrize("kind", [int, numpy.int64])
def test_sequence_numbers_and_positions_decide_over_the_order_of_dicts(kind):
    places = [(1, 1), (0, 0), (1, 0)]
    pairs = as_pairs(
        [{"sequence": kind(row), "position": kind(at), "kl": 10.0 * row + at} for row, at in places]
    )
    assert pairs.column("kl").tolist() == [[0, 0], [10, 11]]
    assert [pair["kl"] for pair in pairs] == [11, 0, 10]


def test_extra_keys_of_plain_dicts_are_kept_through_a_stage():
    from proxima.reward_kl import KLDivergence

    logs = {"logprob_policy": -1.0, "logprob_ref": -1.5}
    dicts = [{**A, **logs, "note": "first"}, {**B, **logs, "label": 7}]
    out = KLDivergence().add_kl_to_sa_pairs(dicts).to_dicts()
    assert [pair.get("note") for pair in out] == ["first", None]
    assert [pair.get("label") for pair in out] == [None, 7]
    assert [pair["kl"] for pair in out] == [0.5, 0.5]
    assert "kl" not in dicts[0]
