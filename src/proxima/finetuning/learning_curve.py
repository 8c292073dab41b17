"""How a reward model's accuracy grows with the number of pairs. In: settings and pairs. Out: accuracies on
the same held-out pairs after training on a quarter, half and all of the others, and what more should bring.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from proxima.config import RewardConfig
from proxima.core.regular_files import read_file
from proxima.core.tokenizer import Tokenizer
from proxima.data import Preference
from proxima.finetuning.finetuning_trainer import FinetuningResults
from proxima.finetuning.reward_trainer import RewardTrainer
from proxima.models import REPORT_FILE
from proxima.runs import write_json

SHARES = (0.25, 0.5)
MORE = 1000  # pairs


@dataclass(frozen=True)
class LearningCurve:
    """Number of pairs and held-out accuracy, in order."""

    points: list[tuple[int, float]]

    @classmethod
    def measure(
        cls,
        config: RewardConfig,
        tokenizer: Tokenizer,
        examples: Sequence[Preference],
        validation: Sequence[Preference] | None,
        results: FinetuningResults,
    ) -> LearningCurve:
        """Train on parts of the pairs, and add the curve to the report of the model that all of them gave.

        Args:
            results: of that model.
        """
        points = []
        with tempfile.TemporaryDirectory() as scratch:
            for share in SHARES:
                settings = replace(config, run_dir=scratch, run_name=f"share-{share}")
                trainer = RewardTrainer(settings, tokenizer=tokenizer)
                order, places = trainer.split(examples)
                if validation is None:
                    held_out: Sequence[Preference] = [examples[i] for i in places]
                else:
                    order, held_out = trainer.shuffled(len(examples)), validation
                part = [examples[i] for i in order[: max(2, round(share * len(order)))]]
                points.append((len(part), trainer.train(part, held_out).best["accuracy"]))
        curve = cls([*points, (len(order), results.best["accuracy"])])
        path = results.folder / REPORT_FILE
        told = {"points": curve.points, "gain": {"pairs": MORE, "accuracy": curve.gain(MORE)}}
        write_json(path, {**json.loads(read_file(path)), "learning_curve": told})
        return curve

    def gain(self, more: int) -> float:
        """What `more` pairs should bring, where accuracy grows with the logarithm of their number: by the
        line through the curve with the least squares; nan where all points have the same number."""
        places = [math.log(count) for count, _ in self.points]
        middle = sum(places) / len(places)
        mean = sum(accuracy for _, accuracy in self.points) / len(places)
        over = sum((place - middle) ** 2 for place in places)
        if not over:
            return math.nan
        pairs = zip(places, self.points, strict=True)
        slope = sum((place - middle) * (accuracy - mean) for place, (_, accuracy) in pairs) / over
        last = self.points[-1][0]
        return slope * math.log((last + more) / last)

    def __str__(self) -> str:
        points = ", ".join(f"{accuracy:.3f} with {count:,}" for count, accuracy in self.points)
        gain = self.gain(MORE)
        more = "too few to tell" if math.isnan(gain) else f"{MORE:,} more should bring about {gain:.3f}"
        return f"held-out accuracy by pairs: {points}; {more}"
