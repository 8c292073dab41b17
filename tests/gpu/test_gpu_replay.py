"""A step recorded on a GPU with the fast engine replays there to the same bits, and on a CPU within the
recorded tolerance; one recorded on a CPU replays on a GPU; one altered byte is named."""

import pytest
import torch

from proxima.cli import main
from proxima.runs import TOLERANCE, read_bundle, write_bundle
from proxima.tools.replay import replay_step
from tests.tools.replay_recipe import BUNDLE, make_model, record

DEVICE = "cuda"  # every line also runs with "cpu"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

BITS = "the same bits in all {} stages"


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


CASES = {
    "top-k": {},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "a function's scores": {"rewards": (vowels,)},
    "one trunk": {"value_model": "policy"},
    "reference path": {"engine": "plain"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("recipe") / "model")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def recorded(model, dtype, tmp_path_factory):
    """A bundle on disk."""
    bundle, trainer = record(model, device=DEVICE, dtype=dtype)
    generation = trainer.models.policy.backbone.generation
    assert generation is not None  # the fast engine sampled
    assert DEVICE == "cpu" or generation.replays > 0  # and its decode steps were CUDA graphs
    path = tmp_path_factory.mktemp("bundles") / dtype
    write_bundle(path, bundle.facts, bundle.tensors)
    return path


def test_the_command_finds_the_same_bits_on_the_same_gpu(recorded, tmp_path, capsys):
    main(
        ["replay", str(recorded), "--out", str(tmp_path / "page.html")]
    )  # exits with 1 where a stage differs
    assert BITS.format(11) in capsys.readouterr().out
    assert 'id="microscope"' in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_the_same_gpu(model, dtype, case):
    bundle, _ = record(model, device=DEVICE, dtype=dtype, **CASES[case])
    comparison = replay_step(bundle).comparison
    taken = [stage.name for stage in comparison.stages if stage.result == "not recomputed"]
    assert comparison.expects_bits
    assert comparison.sentence == BITS.format(11 - len(taken))
    assert taken == (["rewards"] if "rewards" in CASES[case] else [])


def test_a_step_of_the_gpu_on_the_cpu(recorded, dtype):
    bundle = read_bundle(recorded)
    comparison = replay_step(bundle, device="cpu").comparison
    assert comparison.tolerance == bundle.facts["tolerance"] == TOLERANCE[dtype]
    assert comparison.expects_bits == (DEVICE == "cpu")
    assert comparison.first is None, comparison.sentence


def test_the_committed_step_of_a_cpu_on_the_gpu(model):
    comparison = replay_step(read_bundle(BUNDLE), model=model, device=DEVICE).comparison
    assert DEVICE == "cpu" or not comparison.expects_bits
    assert comparison.first is None, comparison.sentence


def test_one_altered_byte_is_named(recorded, tmp_path):
    content, bundle = bytearray(recorded.read_bytes()), read_bundle(recorded)
    weight = bundle.tensors["after/value_head/bias"].numpy().tobytes()
    content[content.rindex(weight)] ^= 1
    (tmp_path / "altered").write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"its tensor 'after/value_head/bias' does not have the checksum"):
        read_bundle(tmp_path / "altered")


def test_one_number_that_the_gpu_did_not_compute_is_named_by_its_stage(recorded, tmp_path):
    bundle = read_bundle(recorded)
    values = bundle.tensors["values/value"].clone()
    values[2, 1] += 2 * bundle.facts["tolerance"]["numbers"] * max(1.0, float(values.abs().max()))
    write_bundle(tmp_path / "other", bundle.facts, {**bundle.tensors, "values/value": values})
    for device in (DEVICE, "cpu"):
        comparison = replay_step(read_bundle(tmp_path / "other"), device=device).comparison
        assert comparison.first.name == "values"
        assert "values/value[2, 1]" in str(comparison.first.worst)
