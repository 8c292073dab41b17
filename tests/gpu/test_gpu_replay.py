"""A step recorded on a GPU replays there to the same bits, and on a CPU within the tolerance; one recorded on
a CPU replays on a GPU."""

import pytest
import torch

from proxima.runs import read_bundle
from proxima.tools.replay import replay_step
from tests.tools.replay_recipe import BUNDLE, make_model, record

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("recipe") / "model")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 0, "top_p": 0.8}], ids=["top-k", "top-p"])
def test_the_same_bits_on_the_same_gpu(model, dtype, sampling):
    bundle, _ = record(model, device="cuda", dtype=dtype, **sampling)
    comparison = replay_step(bundle).comparison
    assert comparison.expects_bits
    assert comparison.sentence == "the same bits in all 11 stages"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_of_the_gpu_on_the_cpu(model, dtype):
    bundle, _ = record(model, device="cuda", dtype=dtype)
    comparison = replay_step(bundle, device="cpu").comparison
    assert not comparison.expects_bits
    assert comparison.first is None, comparison.sentence


def test_the_committed_step_of_a_cpu_on_the_gpu(model):
    comparison = replay_step(read_bundle(BUNDLE), model=model, device="cuda").comparison
    assert not comparison.expects_bits
    assert comparison.first is None, comparison.sentence
