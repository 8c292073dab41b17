"""The demo's report.

In: results, both judgements, the PPO run. Out: one HTML file that tells all of it to a newcomer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.pages.report.report_curves import chart, frontier
from proxima.pages.report.report_page import (
    Page,
    code,
    conclusion,
    folded,
    heading,
    listed,
    numbers,
    pairs,
    paragraph,
    settings,
    table,
)
from proxima.pages.report.report_samples import Pair, cut
from proxima.pages.report.run_facts import Card, percent
from proxima.runs import Run
from proxima.runs.glossary import title_of
from proxima.world.demo.gold_judge import Judgement
from proxima.world.posts import Post

EXAMPLES = 8
CURVES = ("avg_reward", "kl_exact", "response_length")
HABIT = "basically"  # what the annotators like more than they should


def write_report(
    path: Path, results: dict[str, Any], posts: Sequence[Post], before: Judgement, after: Judgement, run: Run
) -> Path:
    """Write the page and return its path.

    It holds no times and no folders: the same results give the same page.
    """
    page = Page("A language model that learned from preferences", "demo report")
    _first_screen(page, results)
    sides = zip(before.texts, after.texts, before.gold, after.gold, strict=True)
    rows = [Pair(_told(post), *side) for post, side in zip(posts, sides, strict=True)]
    page.section(
        "Before and after, on posts it had never seen",
        paragraph(
            "The first of the held-out posts, not chosen ones. Quality: 1 says everything in few words, 0 "
            "is useless.",
            "soft",
        ),
        pairs(rows[:EXAMPLES], "quality"),
    )
    metrics = run.metrics()
    charts = [chart(metrics, [name]) for name in CURVES]
    traded = frontier(metrics)
    page.section("While it trained", page.plots([*charts, traded] if traded else charts))
    page.section(
        "Token microscope",
        paragraph(
            "One summary, token by token: left by the model before PPO, right after it, on the same post. "
            "Blue tokens are "
            "those that PPO made likelier than they were, orange ones less likely. Point at a token for all "
            "its numbers, or "
            "colour by another of them.",
            "soft",
        ),
        page.microscope(
            [
                {"label": label, "samples": [cut(sample) for sample in side.records]}
                for label, side in (("before PPO", before), ("after PPO", after))
            ],
            "kl",
        ),
    )
    measured = [
        (label, f"{results['sft'][name]:.3f}", f"{results['ppo'][name]:.3f}")
        for label, name in Judgement.ROWS.items()
    ]
    page.section(
        f"All numbers, over {len(posts)} posts", table(("", "before (SFT)", "after (PPO)"), measured)
    )
    _reward_model(page, results["reward_model"])
    _weakness(page, before, after)
    page.section(
        "How to repeat it",
        code(f"proxima demo --seed {results['seed']} --steps {results['settings']['steps']}"),
        paragraph(
            "The same seed gives the same numbers. Then, with your own prompts and reward: `proxima train "
            "--help`."
        ),
        folded("Settings of PPO", settings(results["settings"])),
    )
    return page.write(path)


def _first_screen(page: Page, results: dict[str, Any]) -> None:
    sft, ppo, win, model = (
        results["sft"],
        results["ppo"],
        results["win_rate_by_gold"],
        results["reward_model"],
    )
    interval = f"95 %: {percent(win['low'])} to {percent(win['high'])} %"
    better = True if win["low"] > 0.5 else False if win["high"] < 0.5 else None
    grew = {True: "became better", False: "became worse", None: "cannot be told from before"}[better]
    page.section(
        "",
        heading(page.title),
        conclusion(
            f"Its summaries {grew}: their true quality went from {sft['gold']:.2f} to {ppo['gold']:.2f} (1 "
            "is best), and they "
            f"beat those from before {percent(win['rate'])} % of the time.",
            better,
        ),
        paragraph(
            "A small language model had learned to summarise posts by imitating people, some of whom do it "
            "badly. This is how "
            "it learned to do better, from nothing but people's choices between two of its own summaries "
            "(RLHF):"
        ),
        listed(
            [
                "People (here simulated ones, so that there is a true quality to judge by) chose the "
                "better of two summaries, "
                f"{model['preferences']:,} times.",
                "A second model, the reward model, learned to predict these choices: it gives any summary a "
                "score.",
                f"{results['settings']['steps']} steps of PPO made summaries with a high score likelier, "
                "and charged for every "
                "bit of distance from the model it began as, so that it keeps its language.",
                "Summaries from before and after were judged by their true quality: facts kept, none "
                "invented, short, "
                "finished. Training never saw that measure.",
            ]
        ),
        numbers(
            [
                Card("True quality", f"{sft['gold']:.2f} → {ppo['gold']:.2f}", "of at most 1"),
                Card("Wins against before", f"{percent(win['rate'])} %", interval),
                Card(title_of("kl_exact"), f"{ppo['kl']:.1f} nats", "per summary"),
                Card(
                    "Reward model is right",
                    f"{percent(model['accuracy'])} %",
                    f"of {model['pairs']:,} choices it had not seen",
                ),
            ]
        ),
    )


def _reward_model(page: Page, model: dict[str, Any]) -> None:
    rows = [
        (name, f"{row['pairs']}", f"{100 * row['accuracy']:.1f} %")
        for name, row in model["by_gold_gap"].items()
    ]
    page.section(
        "How good is the reward model?",
        paragraph(
            "It is the same small language model with one number as its output, trained so that the chosen "
            "summary of a pair "
            f"gets the higher one. On {model['pairs']} choices it had not seen it agrees with the people "
            f"{100 * model['accuracy']:.1f} % of the time; with the true quality, the more often the "
            "further two lie apart:"
        ),
        table(("true qualities differ by", "pairs", "ordered right"), rows),
    )


def _weakness(page: Page, before: Judgement, after: Judgement) -> None:
    counts = [sum(text.strip().lower().startswith(HABIT) for text in side.texts) for side in (before, after)]
    page.section(
        "Its weakness",
        paragraph(
            f"The people like summaries that open with “{HABIT},” more than these are worth. A reward model "
            "learns its "
            f"teachers' weaknesses, and PPO finds them: {counts[0]} of {len(before.texts)} summaries opened "
            "so before, "
            f"{counts[1]} after. This is reward hacking in the small; the KL penalty is what holds "
            "it back. In the "
            "token microscope the word stands out in blue wherever PPO made it likelier."
        ),
    )


def _told(post: Post) -> str:
    return post.prompt.splitlines()[2].removeprefix("POST: ")
