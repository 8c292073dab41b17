"""A recorded step replays to the same bits, and what differs is named by its stage; on other machines and
versions it replays within the tolerance. Bundles of strangers run nothing."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proxima.cli import main
from proxima.config import RewardSpec
from proxima.ppo_trainer import PPOTrainer, RewardComputer
from proxima.runs import TOLERANCE, read_bundle, write_bundle
from proxima.runs.environment import code_checksum
from proxima.tools.replay import compare_bundles, contents, redacted, replay_step, stage_lines
from tests.rollout_server import RolloutServer
from tests.runtime.test_processes import torchrun
from tests.runtime.test_rollouts import lying_by
from tests.tools.replay_recipe import BUNDLE, OLDEST, PROMPTS, make_model, record

BITS = "the same bits in all {} stages"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("recipe") / "model")


@pytest.fixture(scope="module")
def recorded(model):
    return record(model)[0]


def count_vowels(prompts, texts, hint=None):
    return [sum(text.count(letter) for letter in "aeiou") / 4 for text in texts]


def per_token(prompts, texts, completion_ids):
    return [[0.01 * (token % 7) for token in ids] for ids in completion_ids]


def some_fail(prompts, texts):
    return [None if place == 1 else len(text) / 8 for place, text in enumerate(texts)]


CASES = {
    "plain": {},
    "no truncation of sampling": {"top_k": 0, "top_p": 1.0},
    "kept sets as bits": {"top_k": 0, "top_p": 0.8},
    "reference path": {"engine": "plain"},
    "value on the policy's trunk": {"value_model": "policy"},
    "no critic, groups": {
        "adv_estimator": "grpo",
        "num_generations": 3,
        "whiten_advantages": False,
        "value_learning_rate": 1e-4,
    },
    "adaptive KL": {"kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 20},
    "KL budget": {"kl_controller": "budget", "kl_target": 0.5},
    "stopped": {"kl_stop": 1e-4, "learning_rate": 1e-2},
    "critic warm-up": {"critic_warmup_steps": 5},
    "bootstrap": {"cut_responses": "bootstrap"},
    "leave out": {"cut_responses": "leave_out"},
    "value epochs, penalties": {"value_epochs": 1, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "per-token rewards": {"rewards": (per_token, count_vowels)},
    "failed rewards": {"rewards": (some_fail,), "max_reward_failures": 0.9, "normalize_rewards": True},
    "bfloat16": {"dtype": "bfloat16"},
    "4 bits": {"quantize": "nf4"},
    "a judge, which no step asks": {"judges": ("ends_with_eos",)},
    "length balanced": {"buffer_sampling": "length_balanced", "micro_batch_size": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_on_the_same_machine(model, name, tmp_path):
    bundle, _ = record(model, **CASES[name])
    write_bundle(tmp_path / "b", bundle.facts, bundle.tensors)
    comparison = replay_step(read_bundle(tmp_path / "b")).comparison
    not_done = [stage.name for stage in comparison.stages if stage.result == "not recomputed"]
    assert comparison.expects_bits
    assert comparison.sentence == BITS.format(11 - len(not_done))
    asked = all(isinstance(each, str) for each in CASES[name].get("rewards", ()))
    assert ("rewards" not in not_done) == asked
    assert set(not_done) <= {"rewards", "values", "minibatches"}
    assert [row for row in comparison.settings if row[0].startswith("state ")] == []


def test_a_reference_that_is_an_adapter_and_a_value_that_starts_from_a_reward_model_replay(
    make_config, tiny, tmp_path
):
    first = PPOTrainer(make_config(lora_r=4, lora_targets="q_proj"))
    first.ppo_step(PROMPTS)
    first.save(tmp_path / "saved")
    own = {"sft_adapter": str(tmp_path / "saved" / "policy"), "rewards": (str(tmp_path / "saved" / "value"),)}
    bundle, _ = record(tiny, lora_r=16, **own)
    shutil.rmtree(tmp_path / "saved")
    comparison = replay_step(bundle).comparison
    assert comparison.sentence == BITS.format(10)  # the reward model is gone: its scores are taken


def test_a_step_whose_rewards_run_programs_is_read_and_replays(model, tmp_path, monkeypatch):
    monkeypatch.setattr(RewardComputer, "runs_programs", True)
    bundle, _ = record(model, rewards=(count_vowels,))
    assert "rewards/failed_programs" in bundle.tensors
    write_bundle(tmp_path / "b", bundle.facts, bundle.tensors)
    assert replay_step(read_bundle(tmp_path / "b")).comparison.sentence == BITS.format(10)


def test_the_models_folder_may_move(recorded, model, tmp_path):
    moved = replace(
        recorded, facts={**recorded.facts, "base": {**recorded.facts["base"], "name": "/nowhere"}}
    )
    with pytest.raises(ValueError, match=r"cannot load the .* '/nowhere'"):
        replay_step(moved)
    shutil.copytree(model, tmp_path / "moved")
    assert replay_step(moved, model=str(tmp_path / "moved")).comparison.sentence == BITS.format(11)


def test_another_base_model_is_refused(recorded, tiny):
    with pytest.raises(ValueError, match="is another model than the step was recorded with"):
        replay_step(recorded, model=tiny)


# --- what differs is named ---


def broken(monkeypatch, place, change):
    """A version of the package in which one function gives something else."""
    from importlib import import_module

    module, name = place.rsplit(".", 1)
    original = getattr(import_module(module), name)
    monkeypatch.setattr(place, lambda *given, **named: change(original(*given, **named)))


FAULTS = {
    "log-probabilities": (
        "proxima.ppo_trainer.generator.score_tokens",
        lambda found: (found[0] + 0.01, *found[1:]),
    ),
    "rewards": ("proxima.rewards.ready_made_rewards.in_band", lambda score: score + 0.01),
    "per-token rewards": (
        "proxima.ppo_trainer.ppo_trainer.PPOTrainer._kl_coef",
        lambda kl_coef: 1.1 * kl_coef,
    ),
    "advantages": ("proxima.ppo_trainer.ppo_trainer.estimate", None),
    "whitened advantages": ("proxima.ppo_trainer.ppo_trainer.whiten_advantages", None),
    "minibatches": (
        "proxima.ppo_trainer.model_trainer.policy_objective",
        lambda found: (0.9 * found[0], found[1]),
    ),
}


@pytest.mark.parametrize("stage", FAULTS)
def test_the_first_stage_that_differs_is_named(recorded, monkeypatch, stage):
    place, change = FAULTS[stage]
    if stage == "advantages":
        change = lambda credit: credit._replace(advantages=credit.advantages + 0.05)  # noqa: E731
    if stage == "whitened advantages":
        change = lambda pairs: pairs.with_columns(advantage=1.1 * pairs.column("advantage"))  # noqa: E731
    if stage == "per-token rewards":
        original = PPOTrainer._kl_coef
        monkeypatch.setattr(place, lambda self, rewards: change(original(self, rewards)))
    else:
        broken(monkeypatch, place, change)
    comparison = replay_step(recorded).comparison
    assert comparison.first.name == stage
    assert comparison.first.result == "differs"
    assert comparison.sentence.startswith(f"the first stage that differs: {stage} (")
    results = [each.result for each in comparison.stages]
    assert set(results[: results.index("differs")]) == {"same bits"}


def test_a_wrong_learning_rate_is_found_in_the_update(recorded, monkeypatch):
    original = PPOTrainer._rate
    monkeypatch.setattr(PPOTrainer, "_rate", lambda self: 1.2 * original(self))
    comparison = replay_step(recorded).comparison
    assert comparison.first.name == "minibatches"
    assert " of minibatch 2: " in str(comparison.first.worst)  # the first has the weights of before


def test_another_token_is_named_by_sequence_and_place(recorded):
    ids = recorded.tensors["tokens/response_ids"].clone()
    ids[2, 1] = (ids[2, 1] + 1) % 256
    other = replace(recorded, tensors={**recorded.tensors, "tokens/response_ids": ids})
    stage = compare_bundles(recorded, other).first
    assert stage.name == "sampled tokens"
    assert "(1 of 4 sequences; the first: sequence 2, token 1)" in str(stage.worst)


def test_nan_beside_a_number_and_other_shapes_differ(recorded):
    def first(name, change):
        tensors = {**recorded.tensors, name: change(recorded.tensors[name].clone())}
        return compare_bundles(recorded, replace(recorded, tensors=tensors)).first

    def spoil(column):
        column.view(-1)[0] = torch.nan
        return column

    assert first("values/value", spoil).name == "values"
    assert first("values/value", lambda column: column[:, 1:]).name == "values"
    assert first("update/policy_loss", lambda column: column[1:]).name == "minibatches"
    assert first("after/value_head/bias", spoil).name == "adapters after"
    assert first("rewards/sequence", spoil).name == "rewards"


# --- other machines, other versions ---


def elsewhere(bundle, **changes):
    """The bundle as another machine would have recorded it."""
    environment = {**bundle.facts["environment"], "cpu": "another one"}
    settings = {**bundle.facts["settings"], **changes}
    return replace(bundle, facts={**bundle.facts, "environment": environment, "settings": settings})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_another_order_of_sums_is_within_the_tolerance_of_its_type(model, dtype):
    bundle, _ = record(model, dtype=dtype)
    comparison = replay_step(elsewhere(bundle, engine="plain")).comparison
    assert not comparison.expects_bits
    assert comparison.first is None, comparison.sentence


def test_on_the_same_machine_last_digits_are_a_difference(recorded):
    value = recorded.tensors["values/value"].clone()
    value[0, 0] *= 1 + 2**-20
    other = replace(recorded, tensors={**recorded.tensors, "values/value": value})
    assert compare_bundles(recorded, other).first.name == "values"
    assert compare_bundles(recorded, elsewhere(other)).first is None


def test_0_and_minus_0_are_not_the_same_bits(recorded):
    value = recorded.tensors["values/value"].clone()
    value[:, -1] = 0.0
    before = replace(recorded, tensors={**recorded.tensors, "values/value": value})
    value = value.clone()
    value[2, -1] = -0.0
    other = replace(recorded, tensors={**recorded.tensors, "values/value": value})
    stage = compare_bundles(before, other).first
    assert (stage.name, stage.result) == ("values", "within tolerance")
    assert str(stage.worst) == f"values/value[2, {value.shape[1] - 1}]: 0 and -0"
    assert compare_bundles(before, elsewhere(other)).first is None


@pytest.mark.parametrize("name", ["code", "cpu", "processor", "threads", "packages"])
def test_bits_are_expected_only_where_code_processor_and_versions_are_the_same(recorded, name):
    def of(environment):
        return replace(recorded, facts={**recorded.facts, "environment": environment})

    environment = recorded.facts["environment"]
    assert environment["code"] == code_checksum()
    assert compare_bundles(recorded, of(dict(environment))).expects_bits
    other = compare_bundles(recorded, of({**environment, name: "another one"}))
    assert not other.expects_bits
    assert other.first is None
    assert name in [each[0] for each in other.environment] or name == "packages"  # these one by one
    without = {key: value for key, value in environment.items() if key != name}
    assert not compare_bundles(recorded, of(without)).expects_bits


def test_bits_are_not_expected_of_recordings_that_do_not_say_what_code_ran(recorded):
    named = ("code", "processor")  # earlier versions recorded neither
    environment = {key: each for key, each in recorded.facts["environment"].items() if key not in named}
    older = replace(recorded, facts={**recorded.facts, "environment": environment})
    assert not compare_bundles(older, older).expects_bits


def test_the_page_states_the_tolerances_that_bundles_record():
    table = (
        (Path(__file__).parents[2] / "docs" / "replay.md")
        .read_text(encoding="utf-8")
        .split("| tolerance |")[1]
        .split("\n\n")[0]
    )
    rows = [[cell.strip() for cell in line.split("|")[2:5]] for line in table.splitlines()[2:]]
    kinds = ("numbers", "gradients", "update")
    stated = {kind: [float(cell) for cell in row] for kind, row in zip(kinds, rows, strict=True)}
    for place, dtype in enumerate(("float32", "float16", "bfloat16")):
        assert TOLERANCE[dtype] == {kind: stated[kind][place] for kind in kinds}


@pytest.mark.parametrize("path", [BUNDLE, OLDEST], ids=lambda path: path.stem)
def test_a_committed_step_replays_whatever_the_versions_are(model, path):
    comparison = replay_step(read_bundle(path), model=model).comparison
    assert [stage.name for stage in comparison.stages if stage.result == "not recomputed"] == []
    assert comparison.first is None, comparison.sentence


def test_the_committed_steps_are_of_two_versions_that_the_page_names():
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    recorded = [read_bundle(path).facts["environment"]["packages"] for path in (BUNDLE, OLDEST)]
    for name in ("torch", "transformers", "peft"):
        versions = [packages[name].split("+")[0] for packages in recorded]
        assert len({*versions}) == 2
        assert all(f"{version}" in page for version in versions)


# --- trust ---


def test_functions_servers_and_models_of_a_bundle_are_not_asked(recorded, monkeypatch, tmp_path):
    (tmp_path / "trap.py").write_text(
        "from pathlib import Path\nPath('sprung').touch()\ndef f(p, t): return [0.0] * len(t)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = recorded.facts["reward_names"]
    for source in ("trap:f", "http://127.0.0.1:9/score", "some-organisation/some-model"):
        rewards = [{"source": source, "name": name} for name in names]
        comparison = replay_step(elsewhere(recorded, rewards=rewards)).comparison
        by_name = {stage.name: stage for stage in comparison.stages}
        assert by_name["rewards"].result == "not recomputed"
        assert "taken from the bundle" in by_name["rewards"].why
        assert comparison.first is None
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["environment", "tools"])
def test_environments_and_tools_of_a_bundle_without_episodes_are_refused_before_they_are_imported(
    name, model, monkeypatch, tmp_path
):
    (tmp_path / "evil_mod.py").write_text(
        "from pathlib import Path\nPath('sprung').touch()\nclass Env: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    committed = read_bundle(BUNDLE)
    facts = {**committed.facts["settings"], name: [{"source": "evil_mod:Env"}]}
    write_bundle(tmp_path / "evil", {**committed.facts, "settings": facts}, committed.tensors)
    with pytest.raises(ValueError, match=r"evil: its episodes do not fit the environment and tools"):
        replay_step(read_bundle(tmp_path / "evil"), model=model)
    assert not (tmp_path / "sprung").exists()


def test_rewards_given_are_asked(recorded):
    comparison = replay_step(recorded, rewards=[RewardSpec(count_vowels)]).comparison
    assert comparison.first.name == "rewards"


def test_settings_of_a_bundle_reach_no_tracker_no_server_and_no_remote_code(recorded, tmp_path):
    from proxima.tools.replay.replay_settings import replay_config

    settings = {"trackers": ["tensorboard"], "engine": "vllm", "engine_urls": ["http://127.0.0.1:9"]}
    settings |= {
        "overlap": True,
        "trust_remote_code": True,
        "judges": [{"source": "trap:f"}],
        "record_steps": 1,
    }
    config, _ = replay_config(elsewhere(recorded, **settings), tmp_path, "", (), "")
    assert (config.trackers, config.engine_urls, config.judges, config.overlap) == ((), (), (), False)
    assert (config.engine, config.trust_remote_code, config.record_steps) == ("auto", False, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"r": 60000}, "its adapter has the setting r = 60000"),
        ({"target_modules": "(a+)+$"}, "its adapter has the setting target_modules"),
        ({"auto_mapping": {"base_model_class": "x"}}, "its adapter has the setting auto_mapping"),
        ({"rank_pattern": {"(a+)+$": 2}}, "its adapter has the setting rank_pattern"),
        ({"rank_pattern": {"q_proj": 10**9}}, "its adapter has the setting rank_pattern"),
    ],
)
def test_a_strange_adapter_is_refused(recorded, change, reason):
    adapters = {"value": {**recorded.facts["adapters"]["value"], **change}}
    with pytest.raises(ValueError, match=reason):
        replay_step(replace(recorded, facts={**recorded.facts, "adapters": adapters}))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_r": 65536}, "do not have the rank of its settings"),
        ({"nonsense": 1}, "its settings cannot be used: unknown setting 'nonsense'"),
        ({"batch_size": "x"}, "its settings cannot be used: batch_size"),
        ({"lora_r": 0}, "full fine-tuning"),
        ({"num_generations": 10**9}, "responses are not 1000000000 per prompt"),
        ({"ppo_epochs": 10**9}, "more epochs than it has minibatches"),
        ({"max_new_tokens": 10**9}, "leaves no room for a prompt"),
    ],
)
def test_strange_settings_are_refused(recorded, settings, reason):
    with pytest.raises(ValueError, match=reason):
        replay_step(elsewhere(recorded, **settings))


@pytest.fixture
def no_adapters(monkeypatch):
    """Fails where adapters are made at all."""

    def made(*given, **named):
        raise AssertionError("an adapter was made")

    monkeypatch.setattr("proxima.tools.replay.replayed_step.PPOTrainer", made)


def test_adapters_larger_than_the_recorded_ones_are_refused_before_they_are_made(recorded, no_adapters):
    name = next(each for each in recorded.tensors if each.startswith("before/policy/") and "lora_A" in each)
    tall = {**recorded.tensors, name: torch.zeros(60_000, 1)}
    with pytest.raises(ValueError, match=r"rank 60000 would have [\d,]+ weights on this model"):
        replay_step(replace(elsewhere(recorded, lora_r=60_000), tensors=tall))
    with pytest.raises(AssertionError, match="an adapter was made"):
        replay_step(recorded)


def test_strange_tokens_and_states_are_refused(recorded):
    def refused(reason, **tensors):
        changed = {**recorded.tensors, **{name.replace("__", "/"): each for name, each in tensors.items()}}
        kept = {name: each for name, each in changed.items() if each is not None}
        with pytest.raises(ValueError, match=reason):
            replay_step(replace(recorded, tensors=kept))

    ids, mask = recorded.tensors["tokens/response_ids"], recorded.tensors["tokens/mask"]
    gap = mask.clone()
    gap[:, 0] = False
    refused("outside the model's vocabulary", tokens__response_ids=ids + 10**9)
    refused("outside the model's vocabulary", tokens__response_ids=ids - 10**9)
    refused("outside the model's vocabulary", tokens__kept_ids=recorded.tensors["tokens/kept_ids"] + 9999)
    refused("gaps within sequences", tokens__mask=gap)
    refused("sequences without tokens", tokens__mask=torch.zeros_like(mask))
    name = next(each for each in recorded.tensors if "policy_optimizer" in each and each.endswith("exp_avg"))
    refused("of its optimiser does not fit", **{name.replace("/", "__"): torch.zeros(3)})
    steps = next(each for each in recorded.tensors if each.endswith("value_optimizer/1.step"))
    refused("1.step' holds negative numbers", **{steps.replace("/", "__"): torch.tensor(-3.0)})
    refused("1.step of its optimiser does not fit", **{steps.replace("/", "__"): None})
    refused("its value head does not fit", before__value_head__bias=torch.zeros(2))
    weight = next(each for each in recorded.tensors if each.startswith("before/policy/"))
    nan = torch.full_like(recorded.tensors[weight], torch.nan)
    refused("holds numbers that are not finite, so no step can start", **{weight.replace("/", "__"): nan})
    strange = [("micro_batches", ["a", 9]), ("step", "x"), ("kl_coef", None), ("kl_coef", 10**400)]
    strange += [("total_steps", []), ("kl_budget", 3), ("kl_budget", {"lag": 0.0}), ("kl_budget", {"x": 1.0})]
    strange += [("critic_is_ready", value) for value in (None, "yes", {"a": 1})]
    for name, value in [*strange, ("endings", 3), ("units", {"length_band": ["a"]})]:
        settings = {**recorded.facts["settings"], "kl_controller": "budget"}
        facts = {**recorded.facts, "state": {**recorded.facts["state"], name: value}, "settings": settings}
        if name in ("endings", "units"):  # read as a run's own are: what means nothing is ignored
            replay_step(replace(recorded, facts=facts))
            continue
        with pytest.raises(ValueError, match="its state cannot be restored"):
            replay_step(replace(recorded, facts=facts))


ODD = (
    *(None, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), True, "", "x", "../../etc"),
    *([], {}, [[]], [None], {"a": 1}, "\ud800"),
)


def oddly(chance, facts):
    """Facts of which one or two hold something else."""
    facts = json.loads(json.dumps(facts))
    for _ in range(chance.choice([1, 1, 2])):
        kind = chance.choice(["settings", "state", "state", "state", "adapters", "base", "environment"])
        found = facts[kind]
        if kind in ("adapters", "environment"):
            found = chance.choice([found, *(each for each in found.values() if isinstance(each, dict))])
        if found:
            found[chance.choice(sorted(found))] = chance.choice(ODD)
    return facts


@pytest.mark.parametrize("seed", range(4))
def test_odd_facts_that_are_sealed_are_replayed_or_refused_in_one_line(model, tmp_path, seed):
    committed, chance = read_bundle(OLDEST), random.Random(seed)
    replayed, refused = 0, list[str]()
    for _ in range(10):
        try:
            write_bundle(tmp_path / "odd", oddly(chance, committed.facts), committed.tensors)
            replay_step(read_bundle(tmp_path / "odd"), model=model)
            replayed += 1
        except ValueError as error:
            refused.append(str(error))
    assert replayed
    assert refused
    assert [each for each in refused if len(each.splitlines()) != 1] == []


# --- sharing ---


def test_a_redacted_copy_holds_no_text_no_ids_and_no_weights(recorded, tmp_path):
    path = tmp_path / "shared"
    shared = redacted(recorded)
    write_bundle(path, shared.facts, shared.tensors)
    again = read_bundle(path)
    groups = {
        name for name in again.tensors if name.startswith(("tokens/", "before/", "after/", "reference/"))
    }
    assert groups <= {f"tokens/{name}" for name in ("mask", "ended", "truncated", "sampled_logprobs")}
    content = path.read_bytes()
    for each in recorded.facts["prompts"]:
        assert len(each["text"]) < 3 or json.dumps(each["text"])[1:-1].encode() not in content
    assert str(recorded.facts["base"]["name"]).encode() not in content
    assert compare_bundles(redacted(recorded), again).first is None
    assert compare_bundles(recorded, again).first is None  # what both hold
    moved = again.tensors["tokens/sampled_logprobs"] + 1
    other = replace(again, tensors={**again.tensors, "tokens/sampled_logprobs": moved})
    assert compare_bundles(again, other).first.name == "sampled tokens"
    with pytest.raises(ValueError, match=r"is redacted.*proxima replay A B"):
        replay_step(again)
    assert "it is redacted" in " ".join(contents(again))
    assert "guesses a text can check the guess" in " ".join(contents(again))


def test_a_redacted_copy_names_no_reward(model, tmp_path):
    def reward(prompts, texts):
        return [float(len(text)) for text in texts]

    named = RewardSpec(reward, name="secret-host.example", weight=0.5)
    bundle, _ = record(model, rewards=(named, "length_band,low=2,high=5"))
    judges = [{"source": "/home/someone/judge", "name": "secret-judge", "weight": 1.0}]
    facts = {**bundle.facts, "settings": {**bundle.facts["settings"], "judges": judges}}
    units = {"secret-host.example": [0.0, 1.0]}
    ending = {"source": "/home/someone/secret", "how": "append", "why": "secret/x says so", "is_guess": True}
    endings = {
        "rewards": {"secret-host.example": ending},
        "judges": {"secret-judge": {"secret-judge": ending}},
    }
    facts["state"] = {**facts["state"], "units": units, "endings": endings}
    folders = ("run_dir", "run_name", "sft_adapter", "value_model")
    facts["settings"] |= {name: f"secret-{name}/secret-{name}" for name in folders}
    shared = redacted(replace(bundle, facts=facts))
    write_bundle(tmp_path / "shared", shared.facts, shared.tensors)
    content = (tmp_path / "shared").read_bytes()
    for word in (b"secret", b"someone", b"length_band"):
        assert word not in content
    again = read_bundle(tmp_path / "shared").facts
    assert again["reward_names"] == ["reward 1", "reward 2"]
    mean = bundle.facts["metrics"]["reward/secret-host.example"]
    assert again["metrics"]["reward/reward 1"] == mean
    assert "reward/reward 2" in again["metrics"]
    assert [spec["source"] for spec in again["settings"]["rewards"]] == ["reward 1", "reward 2"]
    assert again["settings"]["judges"] == [{"source": "judge 1", "weight": 1.0}]
    assert again["state"]["units"] == {"reward 1": [0.0, 1.0]}
    kept = {"how": "append", "is_guess": True}
    assert again["state"]["endings"] == {"rewards": {"reward 1": kept}, "judges": {"judge 1": {}}}
    assert redacted(read_bundle(tmp_path / "shared")).facts == again  # of a copy, the same


def test_what_is_inside_is_said_before_it_is_shared(recorded):
    columns = [{**each, "columns": {"answer": "secret"}} for each in recorded.facts["prompts"]]
    told = "\n".join(contents(replace(recorded, facts={**recorded.facts, "prompts": columns})))
    for part in (
        "4 prompts in full",
        "columns answer",
        "4 responses in full",
        "adapters",
        "settings",
        "bytes",
    ):
        assert part in told


# --- the command ---


@pytest.fixture
def on_disk(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "a", recorded.facts, recorded.tensors)
    return tmp_path / "a"


def code(*words):
    try:
        main(["replay", *map(str, words)])
    except SystemExit as end:
        return end.code
    return 0


def test_the_command_recomputes_compares_shows_and_shares(on_disk, recorded, capsys):
    assert code(on_disk) == 0
    assert BITS.format(11) in capsys.readouterr().out
    assert (on_disk.parent / "replay.html").exists()
    assert code(on_disk, "--show", "--out", "shown.html") == 0
    assert "4 prompts in full" in capsys.readouterr().out
    assert code(on_disk, "--share", "copy") == 0
    assert code(on_disk, "--share", "small", "--redact") == 0
    assert read_bundle("copy").tensors.keys() == recorded.tensors.keys()
    assert (on_disk.parent / "small").stat().st_size < 20_000
    assert code(on_disk, "copy") == 0
    assert code("small", "--show") == 0
    changed = recorded.tensors["values/value"] + 1
    write_bundle(on_disk.parent / "b", recorded.facts, {**recorded.tensors, "values/value": changed})
    capsys.readouterr()
    assert code(on_disk, "b") == 1
    assert "the first stage that differs: values (values/value[" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a", "a", "a"], "one bundle, or two"),
        (["a", "--redact"], "--redact is for the copy"),
        (["a", "a", "--show"], "two bundles are only compared"),
        (["a", "a", "--device", "cpu"], "two bundles are only compared"),
        (["a", "a", "--trust-remote-code"], "two bundles are only compared"),
        (["a", "--trust-remote-code"], "name the model you trust with --model-name"),
        (["a", "--share", "a"], "a exists"),
        (["none"], "there is no bundle none"),
    ],
)
def test_mistakes_are_one_line(on_disk, capsys, words, reason):
    assert code(*words) == 2
    assert reason in capsys.readouterr().err


def test_an_altered_byte_is_named_by_the_command(on_disk, capsys):
    content = bytearray(on_disk.read_bytes())
    content[-5] ^= 1
    on_disk.write_bytes(bytes(content))
    assert code(on_disk) == 2
    assert "does not have the checksum it was written with" in capsys.readouterr().err


def test_the_terminal_is_not_steered(recorded):
    evil = elsewhere(recorded, run_name="\x1b[2J\u202e")
    lines = stage_lines(compare_bundles(recorded, evil))
    assert "\x1b" not in "".join(lines)
    assert "\u202e" not in "".join(lines)
    evil = replace(recorded, facts={**recorded.facts, "reason": "\x1b[2J"})
    assert "\x1b" not in "".join(contents(evil))


# --- vLLM, several processes ---


def test_a_step_that_vllm_sampled_replays_to_the_same_bits_except_for_the_sampling(model, tmp_path):
    server = RolloutServer(model, lying_by(0.1))
    try:
        settings = {"engine": "vllm", "engine_urls": (server.url,), "run_dir": str(tmp_path)}
        bundle, trainer = record(model, **settings)
        trainer.generator.release()
    finally:
        server.close()
    assert "scoring/importance" in bundle.tensors
    assert "scoring/outside_kept" in bundle.tensors  # the kept sets are the scoring pass's own
    comparison = replay_step(bundle).comparison
    assert [(stage.name, stage.why) for stage in comparison.stages if stage.result == "not recomputed"] == [
        ("sampled tokens", "taken from the bundle: vLLM sampled them")
    ]
    assert comparison.sentence == BITS.format(10)


def test_a_step_of_two_processes_replays_on_one_within_the_tolerance(model, forked, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt number {i}" for i in range(10)))
    words = f"""train --model-name {model} --data prompts.txt --batch-size 5 --minibatch-size 3 --run-name two
        --rewards length_band,low=2,high=5 --max-new-tokens 6 --record-steps 1 --lora-r 2 --skip-checks
        --learning-rate 1e-3 --device cpu"""
    done = forked(torchrun(2, "-m", "proxima", *words.split()), tmp_path)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "runs" / "two" / "replay" / "step-00000002.safetensors"
    comparison = replay_step(read_bundle(path)).comparison
    assert ("processes", "2", "1") in comparison.environment
    assert not comparison.expects_bits
    assert comparison.first is None, comparison.sentence
