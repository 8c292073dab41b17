"""The demo's report: one HTML file that explains to a newcomer what happened.

In: results, both judgements, the PPO run. Out: the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxima.core.json_record import Record
from proxima.pages.report import (
    Card,
    Page,
    Pair,
    chart,
    code,
    conclusion,
    cut,
    folded,
    frontier,
    heading,
    listed,
    numbers,
    pairs,
    paragraph,
    percent,
    settings,
    table,
)
from proxima.runs import Run, title_of
from proxima.world.demo.gold_judge import Judgement
from proxima.world.posts import Post

EXAMPLES = 8
CURVES = ("avg_reward", "kl_exact", "response_length")
HABIT = "basically"  # the opening that the annotators like more than they should

Results = Record  # what is in results.json


def write_report(
    path: Path, results: Results, posts: Sequence[Post], before: Judgement, after: Judgement, run: Run
) -> Path:
    """Write the page and return its path.

    It holds no times and no folders: the same results give the same page.
    """
    page = Page("A language model that learned from preferences", "demo report")
    _summary(page, results)
    _examples(page, posts, before, after)
    _curves(page, run)
    _microscope(page, before, after)
    _all_numbers(page, results, len(posts))
    _reward_model(page, results["reward_model"])
    _weakness(page, before, after)
    _how_to_repeat(page, results)
    return page.write(path)


def _summary(page: Page, results: Results) -> None:
    """The first screen: the outcome, how it came about, four numbers."""
    sft, ppo = results["sft"], results["ppo"]
    win = results["win_rate_by_gold"]
    better = True if win["low"] > 0.5 else False if win["high"] < 0.5 else None
    change = {True: "got better", False: "got worse", None: "did not clearly change"}[better]
    page.section(
        "",
        heading(page.title),
        conclusion(
            f"Its summaries {change}: their true quality went from {sft['gold']:.2f} to {ppo['gold']:.2f} "
            f"(1 is best), and they beat the ones from before training {percent(win['rate'])} % of the time.",
            better,
        ),
        paragraph(
            "A small language model had learned to summarise posts by imitating people, some of whom do it "
            "badly. It then learned to do better from nothing but people's choices between two of its own "
            "summaries. This is reinforcement learning from human feedback (RLHF):"
        ),
        listed(_four_steps(results)),
        numbers(_cards(results)),
    )


def _four_steps(results: Results) -> list[str]:
    return [
        f"People chose the better of two summaries, {results['reward_model']['preferences']:,} times. (They "
        "are simulated here, so that the true quality of a summary is known.)",
        "A second model, the reward model, learned to predict these choices: it gives any summary a score.",
        f"{results['settings']['steps']} steps of PPO made summaries with a high score more likely. A "
        "penalty on the KL divergence from the original model keeps the language intact.",
        "Summaries from before and after were judged by their true quality: all the facts, none invented, "
        "short, finished. Training never saw this measure.",
    ]


def _cards(results: Results) -> list[Card]:
    sft, ppo = results["sft"], results["ppo"]
    win, model = results["win_rate_by_gold"], results["reward_model"]
    return [
        Card("True quality", f"{sft['gold']:.2f} → {ppo['gold']:.2f}", "1 is best"),
        Card(
            "Win rate against before",
            f"{percent(win['rate'])} %",
            f"95 %: {percent(win['low'])} to {percent(win['high'])} %",
        ),
        Card(title_of("kl_exact"), f"{ppo['kl']:.1f} nats", "per summary"),
        Card(
            "Reward-model accuracy",
            f"{percent(model['accuracy'])} %",
            f"on {model['pairs']:,} held-out choices",
        ),
    ]


def _examples(page: Page, posts: Sequence[Post], before: Judgement, after: Judgement) -> None:
    sides = zip(before.texts, after.texts, before.gold, after.gold, strict=True)
    rows = [Pair(_told(post), *side) for post, side in zip(posts, sides, strict=True)]
    page.section(
        "Before and after, on posts it had never seen",
        paragraph(
            "The first few held-out posts, not a selection. Quality 1 means all the facts in few words, 0 "
            "means useless.",
            "soft",
        ),
        pairs(rows[:EXAMPLES], "quality"),
    )


def _curves(page: Page, run: Run) -> None:
    metrics = run.metrics()
    charts = [chart(metrics, [name]) for name in CURVES]
    traded = frontier(metrics)
    page.section("During training", page.plots([*charts, traded] if traded else charts))


def _microscope(page: Page, before: Judgement, after: Judgement) -> None:
    sides = {"before PPO": before, "after PPO": after}
    page.section(
        "Token microscope",
        paragraph(
            "Summaries of the same posts, token by token: before PPO on the left, after it on the right. "
            "PPO made blue tokens more likely and orange tokens less likely. Point at a token to see all "
            "its numbers, or choose another number to colour by.",
            "soft",
        ),
        page.microscope(
            [
                {"label": label, "samples": [cut(sample) for sample in side.records]}
                for label, side in sides.items()
            ],
            "kl",
        ),
    )


def _all_numbers(page: Page, results: Results, posts: int) -> None:
    measured = [
        (label, f"{results['sft'][name]:.3f}", f"{results['ppo'][name]:.3f}")
        for label, name in Judgement.ROWS.items()
    ]
    page.section(f"All numbers, over {posts} posts", table(("", "before (SFT)", "after (PPO)"), measured))


def _reward_model(page: Page, model: Results) -> None:
    rows = [
        (name, f"{row['pairs']}", f"{100 * row['accuracy']:.1f} %")
        for name, row in model["by_gold_gap"].items()
    ]
    page.section(
        "How good is the reward model?",
        paragraph(
            "It is the same small language model with a single number as its output, trained to give the "
            f"chosen summary of a pair the higher score. On {model['pairs']} held-out choices it agrees "
            f"with people {100 * model['accuracy']:.1f} % of the time. It agrees with the true quality more "
            "often the larger the difference between two summaries:"
        ),
        table(("difference in true quality", "pairs", "ordered correctly"), rows),
    )


def _weakness(page: Page, before: Judgement, after: Judgement) -> None:
    counts = [sum(text.strip().lower().startswith(HABIT) for text in side.texts) for side in (before, after)]
    page.section(
        "Its weakness",
        paragraph(
            f"People like summaries that open with “{HABIT},” more than they should. A reward model learns "
            f"the weaknesses of its teachers, and PPO exploits them: {counts[0]} of {len(before.texts)} "
            f"summaries opened that way before, {counts[1]} after. This is reward hacking on a small scale; "
            "the KL penalty is what keeps it in check. In the token microscope the word is blue wherever "
            "PPO made it more likely."
        ),
    )


def _how_to_repeat(page: Page, results: Results) -> None:
    page.section(
        "How to repeat it",
        code(f"proxima demo --seed {results['seed']} --steps {results['settings']['steps']}"),
        paragraph(
            "The same seed gives the same numbers. For your own prompts and reward, see `proxima train "
            "--help`."
        ),
        folded("PPO settings", settings(results["settings"])),
    )


def _told(post: Post) -> str:
    return post.prompt.splitlines()[2].removeprefix("POST: ")
