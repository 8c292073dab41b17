"""Value errors by position and by quartile, against plain Python; in the metrics and in the report."""

import math
import random
from statistics import fmean

import torch

from proxima.pages.report.report_curves import charts_by_group
from proxima.ppo_trainer import PPOTrainer
from proxima.runs.value_calibration import value_calibration
from tests.formula_cases import near


def oracle(rows):
    """Rows of (value, return) of real tokens."""
    by_position, tokens = {part: [] for part in range(4)}, []
    for row in rows:
        for at, (value, target) in enumerate(row):
            by_position[4 * at // len(row)].append(target - value)
            tokens.append((value, target - value))
    by_value = {part: [] for part in range(4)}
    for rank, (_, error) in enumerate(sorted(tokens)):
        by_value[4 * rank // len(tokens)].append(error)
    found = {"position": by_position, "quantile": by_value}
    return {
        f"value_error_{kind}/{part + 1}": fmean(errors) if errors else math.nan
        for kind, parts in found.items()
        for part, errors in parts.items()
    }


def calibration(rows, width=9):
    """Of rows in which None stands for a token that the policy did not choose."""
    padded = [[*row, *([None] * (width - len(row)))] for row in rows]
    mask = torch.tensor([[cell is not None for cell in row] for row in padded])
    filled = torch.tensor([[cell or (77.0, -55.0) for cell in row] for row in padded], dtype=torch.float64)
    return value_calibration(filled[..., 0], filled[..., 1], mask)


def test_errors_by_quarter_and_quartile_over_ragged_rows_with_holes():
    draw = random.Random(3)
    rows = [
        [(round(draw.gauss(0, 1), 1), draw.gauss(0, 1)) for _ in range(size)] for size in (1, 2, 4, 5, 7, 3)
    ]
    expected = near(oracle(rows))
    assert calibration(rows) == expected
    assert calibration(rows[::-1], width=12) == expected, "neither order nor padding counts"
    holed = [[row[0], None, *row[1:], None] for row in rows]
    assert calibration(holed) == expected, "a hole is as if it were not there"


def test_a_part_without_tokens_has_no_number():
    found = calibration([[(0.5, 1.0)], [(0.5, 0.0)]])
    assert (found["value_error_position/1"], found["value_error_quantile/1"]) == (0.0, -0.5)
    assert found["value_error_quantile/3"] == 0.5
    assert math.isnan(found["value_error_position/2"])


def test_a_step_measures_them_where_there_is_a_value_model_and_the_report_draws_them(make_config, prompts):
    outcome = PPOTrainer(make_config()).ppo_step(prompts)
    named = [name for name in outcome if name.startswith("value_error_")]
    assert len(named) == 8
    charts = {
        chart["title"]: [one["name"] for one in chart["series"]]
        for _, drawn in charts_by_group({"step": [1, 2], **{name: [0.0, 1.0] for name in named}})
        for chart in drawn
    }
    assert charts == {
        "Value error by position": named[:4],
        "Value error by quartile of the value": named[4:],
    }
    groups = {"adv_estimator": "rloo", "num_generations": 2, "whiten_advantages": False}
    without = PPOTrainer(make_config(**groups, value_learning_rate=1e-4)).ppo_step(prompts[:2])
    assert not [name for name in without if name.startswith("value_error_")]
