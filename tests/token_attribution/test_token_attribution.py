"""`TokenAttributor`: pairs from the record of `generate`, or from a text and plain numbers."""

import pytest

from proxima.base_setup import BaseSetup
from proxima.config import PPOConfig
from proxima.ppo_trainer import SequenceGenerator
from proxima.token_attribution import TokenAttributor


@pytest.fixture(scope="module")
def generator(tiny_folders):
    config = PPOConfig(model_name=tiny_folders["qwen3"], max_new_tokens=5)
    setup = BaseSetup(config)
    return SequenceGenerator(setup.models, setup.tokenizer, config)


@pytest.fixture(scope="module")
def tokenizer(generator):
    return generator.tokenizer


def test_a_record_of_generate_gives_pairs_one_by_one_or_as_a_batch(generator, prompts):
    texts, record = generator.generate(prompts)
    batch = TokenAttributor().extract_pairs(texts, record)
    one_by_one = [TokenAttributor().extract_pairs(text, one) for text, one in zip(texts, record, strict=True)]
    assert batch.storage is record.storage
    assert len(batch) == sum(map(len, one_by_one)) == sum(map(len, record.logprobs))
    assert batch.to_dicts() == generator.generate_sequences(prompts)[0].to_dicts()
    for row, pairs in enumerate(one_by_one):
        expected = [dict(pair) | {"sequence": 0} for pair in batch if pair["sequence"] == row]
        assert pairs.to_dicts() == expected
        assert pairs[0]["state"] == prompts[row]
        assert None not in (pairs[0]["logprob_policy"], pairs[0]["logprob_ref"])


def test_a_record_is_refused_with_texts_that_are_not_its_own(generator, prompts):
    texts, record = generator.generate(prompts)
    with pytest.raises(ValueError, match=f"3 texts for a rollout of {len(prompts)} sequences"):
        TokenAttributor().extract_pairs(texts[:3], record)
    with pytest.raises(ValueError, match="text 1 is not the rollout's own: got 'other'"):
        TokenAttributor().extract_pairs([texts[0], "other", *texts[2:]], record)
    with pytest.raises(ValueError, match="give a rollout for several"):
        TokenAttributor().extract_pairs(["a", "b"], [-1.0, -2.0])


@pytest.mark.parametrize("text", ["one two  three", " led by space", "ends in space ", "café 😀"])
@pytest.mark.parametrize("cut", ["words", "tokens"])
def test_plain_numbers_give_pairs_without_a_reference(tokenizer, text, cut):
    count = len(text.encode()) if cut == "tokens" else len(text.split()) + text.endswith(" ")
    logprobs = [-0.5 * i for i in range(count)]
    pairs = TokenAttributor(tokenizer if cut == "tokens" else None).extract_pairs(text, logprobs, prompt="Q:")
    assert [pair["logprob_policy"] for pair in pairs] == logprobs
    assert all(pair["logprob_ref"] is None for pair in pairs)
    assert "".join(pair["action"] for pair in pairs) == text
    assert pairs[-1]["state"] + pairs[-1]["action"] == "Q:" + text
    assert not any("\ufffd" in pair["state"] for pair in pairs)
    with pytest.raises(ValueError, match=f"{count} tokens but there are {count + 1} log-probabilities"):
        TokenAttributor(tokenizer if cut == "tokens" else None).extract_pairs(text, [*logprobs, 0.0])
