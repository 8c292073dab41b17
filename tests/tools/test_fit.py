"""`proxima doctor --fit`: the search by arithmetic, and trials on this machine."""

import json
from types import SimpleNamespace

import pytest

from proxima.cli import main
from proxima.config import PPOConfig
from proxima.tools.doctor import fit
from proxima.tools.doctor.fit import largest, run_trial, search
from proxima.tools.doctor.memory_estimate import GIB


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 100, 255, 256, 999])
@pytest.mark.parametrize("most", [1, 5, 256])
def test_largest_that_fits(limit, most):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= limit

    found = largest(fits, 1, most)
    assert found <= min(limit, most)
    assert found >= min(limit, most) * 0.5 or found == min(limit, most)
    assert max(tried) <= most
    assert len(tried) == len(set(tried)) <= 8


def test_search_by_a_formula():
    """Memory as a sum of what a pass, the cache and the base take; every result is near its bound."""
    config = PPOConfig(batch_size=32, minibatch_size=16, max_new_tokens=64)
    prompt, room, tried = 36, 1000, []

    def memory(settings):
        longest = prompt + settings.max_new_tokens
        passes = max(longest, min(settings.micro_batch_size * longest, settings.micro_batch_tokens))
        return 1000 + 2 * passes + settings.batch_size * longest

    def fits(settings):
        tried.append(settings)
        return memory(settings) <= 8000

    found = search(config, prompt, room, 8000, fits)
    assert 8 <= found.micro_batch_size <= 16
    assert found.micro_batch_tokens == found.micro_batch_size * 100
    assert found.batch_size >= 25
    assert found.longest_response >= 64
    kept = PPOConfig(**{**config.to_dict(), **found.settings, "rewards": (), "judges": ()})
    assert memory(kept) <= 8000
    assert all(settings.max_new_tokens <= room for settings in tried)
    assert len(tried) == len({str(settings) for settings in tried})


def test_of_episodes_the_whole_ones_must_fit():
    """3 turns of 64 tokens and 32 read after each, beside a prompt of 36."""
    config = PPOConfig(environment="game:Game", max_turns=3, max_new_tokens=64, minibatch_size=8)
    found = search(config, 36, 288, GIB, lambda settings: settings.micro_batch_size <= 2)
    assert found.micro_batch_tokens == 2 * (36 + 3 * (64 + 32))
    assert found.longest_response == 288
    with pytest.raises(ValueError, match=r"an episode of max_turns \(3\) x .* does not fit beside it"):
        search(config, 36, 287, GIB, lambda settings: True)


def test_a_trial_of_episodes_is_of_responses_as_long(monkeypatch):
    seen = []

    def run(command, input, **_):
        seen.append(json.loads(input)["config"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(fit.subprocess, "run", run)
    settings = {"environment": "game:Game", "discount": "turn", "max_turns": 3, "max_new_tokens": 64}
    assert run_trial(PPOConfig(**settings), "p", GIB, 1.0)
    assert PPOConfig.from_dict(seen[0]).max_new_tokens == 288
    assert not PPOConfig.from_dict(seen[0]).has_episodes


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"not even one sequence of 74 tokens fits 1.0 GiB; set quantize"):
        search(PPOConfig(max_new_tokens=64), 10, 500, GIB, lambda settings: False)
    with pytest.raises(
        ValueError, match=r"max_new_tokens \(64\) does not fit beside it; the model leaves 50"
    ):
        search(PPOConfig(max_new_tokens=64), 10, 50, GIB, lambda settings: True)


def test_the_command_prints_settings(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.txt").write_text("one\na longer prompt\n")
    given = []

    def trial(config, prompt, allowed, seconds):
        given.append((prompt, allowed, config.quantize))
        return config.batch_size <= 4 and config.max_new_tokens <= 20

    monkeypatch.setattr(fit, "run_trial", trial)
    command = ["doctor", "--model-name", tiny, "--data", str(tmp_path / "prompts.txt"), "--fit", "--memory"]
    main([*command, "2.5", "--batch-size", "8", "--max-new-tokens", "5", "--quantize", "nf4"])
    shown = capsys.readouterr()
    assert set(given) == {("a longer prompt", int(2.5 * GIB), "nf4")}
    lines = shown.out.splitlines()
    assert lines[0] == "# fits 2.5 GiB; responses of up to 20 tokens fitted too"
    assert lines[1:] == ["micro_batch_size: 4", f"micro_batch_tokens: {4 * (15 + 5)}", "batch_size: 4"]
    assert "out of memory" in shown.err


def test_no_trial_that_follows_from_another():
    tried = []

    def fits(settings):
        tried.append((settings.micro_batch_size, settings.batch_size, settings.max_new_tokens))
        return settings.max_new_tokens <= 80

    search(PPOConfig(batch_size=64, minibatch_size=32, max_new_tokens=40), 60, 452, GIB, fits)
    assert tried[:6] == [(1, 1, 40), (4, 4, 40), (16, 16, 40), (32, 32, 40), (32, 128, 40), (32, 256, 40)]
    assert tried[6:] == [(32, 64, 160), (32, 64, 100), (32, 64, 70)]  # not (32, 64, 40), which must fit


@pytest.mark.parametrize("allowed", [0, 3, 5])
def test_the_search_ends_in_time(allowed, tiny, tmp_path, monkeypatch, capsys):
    """After some trials the time is up: what fitted until then is printed."""
    (tmp_path / "prompts.txt").write_text("one\n")
    now, given = [0.0], []

    def trial(config, prompt, memory, seconds):
        given.append(seconds)
        now[0] += 600 / (allowed or 0.5)
        return True if now[0] <= 600 else None

    monkeypatch.setattr(fit, "run_trial", trial)
    monkeypatch.setattr(fit, "time", SimpleNamespace(monotonic=lambda: now[0]))
    command = ["doctor", "--model-name", tiny, "--data", str(tmp_path / "prompts.txt"), "--fit"]
    command += ["--batch-size", "8", "--minibatch-size", "8", "--max-new-tokens", "5"]
    if not allowed:
        with pytest.raises(SystemExit):
            main(command)
        assert "a step of one sequence takes more than 10 minutes" in capsys.readouterr().err
        return
    main(command)
    shown = capsys.readouterr()
    assert "# the search ended after 10 minutes, so more may fit" in shown.out
    assert "micro_batch_size: 8" in shown.out
    assert "for up to 10 minutes" in shown.err
    assert shown.err.count("no time left") == 1
    assert len(given) == allowed
    assert given == sorted(given, reverse=True)
    assert given[0] == 600


@pytest.mark.long  # starts processes that load torch
def test_real_trials(tiny):
    """A step of a tiny model fits 4 GiB and not 64 MiB, less than torch itself takes."""
    config = PPOConfig(model_name=tiny, batch_size=1, max_new_tokens=2, ppo_epochs=1, quantize="nf4")
    assert run_trial(config, "hello", 4 * GIB, 600)
    assert run_trial(config, "hello", 2**26, 600) is False
    assert run_trial(config, "hello", 4 * GIB, 0.01) is None


@pytest.mark.long  # five processes, one after the other
@pytest.mark.timeout(3600)
def test_a_whole_search_with_real_trials_ends_at_what_the_model_reads(tiny, tmp_path, monkeypatch, capfd):
    """In 4 GiB all of it fits: each number is the largest there is, and it is found without an idle trial."""
    (tmp_path / "prompts.txt").write_text("one\na longer prompt\n")
    monkeypatch.setattr(fit, "MINUTES", 60)
    command = ["doctor", "--model-name", tiny, "--data", str(tmp_path / "prompts.txt"), "--fit"]
    command += ["--memory", "4", "--device", "cpu", "--batch-size", "2", "--minibatch-size", "2"]
    monkeypatch.setattr(fit, "MOST_SEQUENCES", 2)
    main([*command, "--max-new-tokens", "16", "--ppo-epochs", "1"])
    shown = capfd.readouterr()
    room = 256 - len("a longer prompt")
    assert shown.out.splitlines() == [
        f"# fits 4.0 GiB; responses of up to {room} tokens fitted too",
        "micro_batch_size: 2",
        f"micro_batch_tokens: {2 * (len('a longer prompt') + 16)}",
        "batch_size: 2",
    ]
    trials = [line for line in shown.err.splitlines() if line.startswith("micro_batch_size")]
    assert len(trials) == 4
    assert all(line.endswith(": fits") for line in trials)


@pytest.mark.long
def test_other_failures_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"a trial failed, not for want of memory: .*cannot load"):
        run_trial(PPOConfig(model_name=str(tmp_path), batch_size=1), "hello", 4 * GIB, 600)
