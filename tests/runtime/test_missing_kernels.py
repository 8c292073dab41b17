"""Where Triton's kernels cannot run, a logged line says so and torch's functions take their place."""

import pytest
import torch

from proxima.runtime.engine import vocabulary
from proxima.runtime.engine.layer_functions import DecoderShape, kernel_functions


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_kernels_that_cannot_run_are_named_in_the_log(caplog):
    device = torch.device("cuda")
    vocabulary.kernels_run.cache_clear()
    assert not vocabulary.kernels_run(device)
    vocabulary.kernels_run.cache_clear()
    shape = DecoderShape(heads=4, kv_heads=2, head_size=32, eps=1e-6, scale=1.0, activation="")
    assert kernel_functions(shape, device) is None
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in lines] == [
        "log-probabilities without their kernels",
        "norms without their kernels",
    ]


@pytest.mark.parametrize("top_k", [0, 3])
def test_scores_and_log_probabilities_without_kernels_are_those_of_core(top_k):
    from proxima.core import sampling

    torch.manual_seed(0)
    logits, others, ids = torch.randn(5, 11), torch.randn(5, 11), torch.randint(11, (5,))
    kept = sampling.truncate(logits, top_k, 1.0)
    if kept is not None:
        ids = kept.ids[:, 0, 0].long()
    found = vocabulary.score_tokens(logits, others, ids, kept, 0.7)
    wanted = sampling.score_tokens(logits[:, None], others[:, None], ids[:, None], kept, 0.7)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs[:, 0])
    assert torch.equal(vocabulary.token_logprobs(logits, ids, kept, 0.7), found[0])
