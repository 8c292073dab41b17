"""Prompts are read ahead during the update, and only the very prompts of the next step take what was read."""

import threading
from contextlib import nullcontext

from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.read_ahead import ReadAhead


def test_what_was_read_is_taken_once_and_by_the_same_prompts_alone():
    threads = []

    def read(prompts):
        threads.append(threading.current_thread())
        return list(prompts)

    ahead, prompts = ReadAhead(read), ["one", "two"]
    for given, found in ((prompts, prompts), (prompts, None), (["".join(("o", "ne")), "two"], None)):
        if given is not prompts or found:
            ahead.next_prompts = lambda: prompts
            with ahead.running():
                pass
        assert ahead.take(given) == found
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_prompts_that_cannot_be_read_are_left_to_their_own_step():
    ahead = ReadAhead(lambda prompts: 1 / 0)
    ahead.next_prompts = lambda: ["one"]
    with ahead.running():
        pass
    assert ahead.take(["one"]) is None


def test_a_run_reads_each_batch_after_the_first_ahead_and_trains_as_without(make_config, monkeypatch):
    prompts, results = [f"prompt {i}" for i in range(6)], {}
    for is_on in (True, False):
        trainer = PPOTrainer(make_config(batch_size=2, run_name=f"ahead-{is_on}"))
        ahead, taken = trainer.generator.read_ahead, []
        if not is_on:
            monkeypatch.setattr(ReadAhead, "running", lambda self: nullcontext())
        take = ahead.take
        ahead.take = lambda given, take=take, taken=taken: taken.append(take(given)) or taken[-1]
        results[is_on] = [row["policy_loss"] for row in trainer.train(prompts).metrics]
        assert [tokens is not None for tokens in taken] == [False, is_on, is_on]
        assert ahead.next_prompts is None
    assert results[True] == results[False]
