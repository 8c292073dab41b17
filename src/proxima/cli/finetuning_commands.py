"""`proxima sft` and `proxima reward`: fine-tuning before PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import FinetuningConfig, RewardConfig


@dataclass
class Sft(Command):
    """Fine-tune a model on demonstrations (supervised): it becomes the reference of PPO."""

    example: ClassVar[str] = (
        "proxima sft --model-name embedded --data my-data/demonstrations.jsonl --limit 64 --run-name sft"
    )
    writes: ClassVar[str] = (
        "`runs/NAME`: the adapter (with `lora_r` 0 the model), the tokenizer, `finetuning.yaml` with "
        "the settings, `sft.json` with the best measurement, `metrics.jsonl` and `log.txt` as it trains. "
        "Later commands take it: `--sft-adapter runs/NAME`."
    )
    guide: ClassVar[str] = "data.md"

    finetuning: FinetuningConfig
    data: str
    """Demonstrations: a file, a folder or a Hugging Face dataset, OWNER/NAME[/CONFIG][:SPLIT];
    docs/data.md lists the forms."""
    validation: str = ""
    """Held-out demonstrations; by default a share of the data."""
    limit: int = 0
    """Use only the first `limit` rows of the data; 0 = all."""

    def run(self) -> None:
        from proxima.base_setup import load_tokenizer
        from proxima.data import open_rows, read_demonstrations
        from proxima.finetuning import SFTTrainer

        rows = open_rows(self.data, self.limit)
        held_out_rows = open_rows(self.validation) if self.validation else None
        tokenizer = load_tokenizer(self.finetuning.model_name, self.finetuning.trust_remote_code)
        examples = read_demonstrations(rows, tokenizer)
        held_out = read_demonstrations(held_out_rows, tokenizer) if held_out_rows is not None else None
        results = SFTTrainer(self.finetuning, tokenizer=tokenizer).train(examples, held_out)
        best = results.best
        print(
            f"stopped: {results.stop_reason}; validation loss {best['validation_loss']:.4f} at step "
            f"{best['step']:.0f}"
        )
        print(f"left out as too long: {results.left_out}; saved to {results.folder}")


@dataclass
class Reward(Command):
    """Train a reward model on preferences (which of two answers is better) or ratings (how good an answer
    is)."""

    example: ClassVar[str] = (
        "proxima reward --model-name embedded --data my-data/preferences.jsonl --limit 64 --run-name reward"
    )
    writes: ClassVar[str] = (
        "`runs/NAME`: the adapter (with `lora_r` 0 the model), its head, the tokenizer, "
        "`finetuning.yaml` with the settings, `reward.json` with the held-out accuracy, `metrics.jsonl` and "
        "`log.txt` as it trains. Later commands: `--rewards runs/NAME`."
    )
    guide: ClassVar[str] = "rewards.md"

    reward_training: RewardConfig
    data: str
    """Preferences or ratings: a file, a folder or a Hugging Face dataset, OWNER/NAME[/CONFIG][:SPLIT]; see
    docs/data.md."""
    validation: str = ""
    """Held-out examples; by default a share of the data."""
    continue_from: str = ""
    """Folder of a reward model to start from (`--continue` for short): its training continues, on the new
    data and the earlier examples together."""
    earlier: str = ""
    """With `--continue`, the earlier examples: a file; by default those that the folder says it was trained
    on; `none` = only the new ones."""
    demonstrations: str = ""
    """Demonstrations that shall score 0 on average; by default answers that the base model samples do."""
    learning_curve: bool = False
    """Also train on a quarter and on half of the pairs (in three quarters of the time again), and estimate
    what more pairs should bring."""
    limit: int = 0
    """Use only the first `limit` rows of the data; 0 = all."""

    def run(self) -> None:
        from proxima.base_setup import load_tokenizer
        from proxima.cli.continued_reward import (
            ExampleSource,
            continued,
            earlier_sources,
            note_sources,
            with_earlier,
        )
        from proxima.data import kinds_of, open_rows, read_demonstrations, read_preferences, read_ratings
        from proxima.finetuning import LearningCurve, RatingTrainer, RewardTrainer

        config = self.reward_training
        earlier = earlier_sources(self.continue_from, self.earlier, config)
        rows = open_rows(self.data, self.limit)
        held_out_rows = open_rows(self.validation) if self.validation else None
        centre_rows = open_rows(self.demonstrations) if self.demonstrations else None
        tokenizer = load_tokenizer(config.model_name, config.trust_remote_code)
        centre = read_demonstrations(centre_rows, tokenizer) if centre_rows is not None else None
        kinds = kinds_of(rows)
        rated = "ratings" in kinds and "preferences" not in kinds
        self._check_learning_curve(rated)
        if rated:
            ratings = with_earlier(read_ratings, rows, earlier, tokenizer)
            held_out = read_ratings(held_out_rows, tokenizer) if held_out_rows is not None else None
            rating_trainer = RatingTrainer(config, tokenizer=tokenizer, centre_on=centre)
            results = continued(rating_trainer, self.continue_from, ratings).train(ratings, held_out)
            kept = rating_trainer.held_out
        else:
            pairs = with_earlier(read_preferences, rows, earlier, tokenizer)
            held_out_pairs = read_preferences(held_out_rows, tokenizer) if held_out_rows is not None else None
            reward_trainer = RewardTrainer(config, tokenizer=tokenizer, centre_on=centre)
            results = continued(reward_trainer, self.continue_from, pairs).train(pairs, held_out_pairs)
            kept = reward_trainer.held_out
        note_sources(results.folder, [ExampleSource(self.data, self.limit), *earlier], kept)
        best = results.best
        calibration = "" if rated else f", calibration error {best['calibration_error']:.3f}"
        print(f"trained on {'ratings' if rated else 'preferences'}; stopped: {results.stop_reason}")
        print(f"held-out accuracy {best['accuracy']:.3f}, loss {best['validation_loss']:.4f}{calibration}")
        if not rated:
            print("\n".join(reward_trainer.report_lines(results)))
            if self.learning_curve:
                print(LearningCurve.measure(config, tokenizer, pairs, held_out_pairs, results))
        print(f"left out as too long: {results.left_out}; use it with --rewards {results.folder}")

    def _check_learning_curve(self, rated: bool) -> None:
        """Every point of a curve is a model trained from the start, on pairs."""
        if self.learning_curve and (rated or self.continue_from):
            given = f"ratings ({self.data})" if rated else f"--continue {self.continue_from}"
            raise ValueError(
                f"--learning-curve trains on parts of the pairs from the start, got {given}; leave it out"
            )
