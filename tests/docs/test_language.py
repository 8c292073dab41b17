"""The project speaks the field's language: no text says "rewards a token" where an engineer says "per-token
rewards".

Texts that must keep an old word are listed in `ALLOWED`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    ".github",
    "Dockerfile",
    "Makefile",
    "main.py",
    "mkdocs.yml",
    "docs",
    "src",
    "tests",
    "tools",
    "examples",
)
KINDS = (".md", ".py", ".js", ".html", ".yaml", ".yml", ".sh", ".svg", ".ipynb")
ALLOWED = {
    ("src/proxima/evaluator/evaluator.py", "verdicts"),
    ("src/proxima/evaluator/pair_judge.py", "verdicts"),
    ("src/proxima/runs/checkpoint/checkpoints.py", "verdict"),
    ("tests/config/test_former_names.py", "verdict"),
    ("tests/config/test_former_names.py", "verdicts"),
    ("tests/evaluator/test_evaluator.py", "verdicts"),
}
"""File and phrase, where the name that an earlier release wrote to disk is read."""

UNIT = (
    "(?:token|step|sequence|prompt|process|epoch|minibatch|micro-batch|evaluation|setting|command|metric|pair"
    "|row|response|completion|answer|item|line|page|file|run|case|layer|device|GPU|second|request|rollout"
    "|sample|summary|role|adapter|projection|kind|parameter|position|text|block)"
)
AMOUNT = r"(?:one|two|three|four|an?|each|several|as many|\d[\d,.]*)"
THING = (
    "(?:number|row|line|response|sequence|item|entry|file|page|chart|point|column|cell|record|dict|list|table"
    "|seed|sample|score|value|preference|answer|completion|mapping|query|engine|graph|comment|object|vector"
    "|permutation|dataclass|lock|curve|pass|weight|prompt|step|token|test|folder for|addition|call)"
)
MEASURE = "(?:rewards|nats|seconds|bytes|[GMK]i?B|KL|(?:cross-)?entropy|loss(?:es)?|advantages|(?:log-)?probabilit(?:y|ies))"

IDIOMS = {
    rf"(?i:{MEASURE}) an? {UNIT}": "per-token ..., ... per step",
    r"(?i:value|target|policy|weight|reward|cache) a token": "per-token value, per-token reward",
    rf"(?i:{AMOUNT}) (?:(?!to )[\w-]+ ){{0,2}}{THING}s? an? {UNIT}": "one line per step, two answers per prompt",
    r"(?i:steps?) an epoch|(?i:sequences|rows) a (?:minibatch|pass)": "steps per epoch",
    rf"(?<!step\s)(?<!,)(?i:one|two|three|\d+) an? {UNIT}": "one per token",
    rf"(?<![\w'’])(?:s|ms|us) an? {UNIT}": "s per step",
    r"verdicts?": "evaluation",
    r"(?:the|plain|fast|whole) roads?": "the pipeline, the reference path, the fast path",
    r"plain (?:path|way)": "the reference path",
    r"bit for bit": "bit-exactly",
    r"deviation (?:of )?1": "unit variance",
    r"(?:end|ends|ended|ending) by (?:itself|themselves)": "finished, EOS rate",
    r"price of (?:distance|leaving)": "KL coefficient, KL penalty",
    r"distance from the (?:start|reference)": "KL to the reference",
    r"the first process(?:'s)?": "the main process",
    r"(?i:mend|mends|mended|mending)": "fix",
    r"(?:of|on|at|by|after|in|to) so many": "the number, by its name",
    r"whole numbers?": "integers",
    r"(?<!ZeRO\s)(?i:stages?) \d": "phase 3",
    r"(?:SFT|reward|fine-tuning|supervised|training) stages?": "fine-tuning",
    r"(?:is|was) gone back to": "rolled back to",
    r"weighed": "weighted",
    r"(?<!here\s)is no (?!longer|more|better|worse|need|such|way|word|concern|different|larger|smaller)[a-z]+": "is not a ...",
    r"but for (?:times|rounding|dropout|one|two|three|four|the|what)": "except for, apart from",
    r"(?:score|reward|mean|return|reward-to-go) less (?:the|its|their)": "minus",
    r"(?:run|training|audit|demo) goes on": "continues",
    rf"(?i:counts?|counted) (?:once|twice) an? {UNIT}": "once per item",
    r"less `\w+`": "minus",
    r"for ever": "indefinitely, forever",
    r"(?:is|are|was|were|and|or|be) passed over": "skipped, ignored",
    r"went back (?:to (?:step|a checkpoint|the last))": "rolled back to",
    r"[Ww]here there (?:is|are) (?:one|none|any)": "if there is one",
    r"(?i:no number is (?:ever )?made up)": "missing rewards are never imputed",
    r"(?:tried|which was tried) is": "has been tried on",
}
"""What nobody in the field says, and what to say instead; blanks stand for any space between two words."""
PATTERNS = [
    (re.compile(rf"(?<![\w-])(?:{idiom})(?![\w-])".replace(" ", " +")), say) for idiom, say in IDIOMS.items()
]
TEST_NAME = re.compile(r"(?m)^ *(?:async )?def (test_\w+)")
BREAK = re.compile(r"(?<!\n)[\"']?[ \t]*\n(?!\s*\n)[ \t]*(?:[#*>|]|//|[fr]?[\"'])?[ \t]*")


def idioms(text: str) -> list[tuple[int, str, str]]:
    """Line, phrase and what to say instead, for every idiom of a text; a phrase may go over a line's end."""
    text = TEST_NAME.sub(lambda found: found[0].replace("_", " "), text)  # read as the sentence it is
    joined = BREAK.sub(lambda found: " " * len(found[0]), text)  # as long as before: places stay the same
    return sorted(
        (text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), say)
        for pattern, say in PATTERNS
        for found in pattern.finditer(joined)
    )


def texts(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.rglob("*") if path.suffix in KINDS and path != Path(__file__))


def said(path: Path) -> list[str]:
    """What a file should say otherwise, one line each."""
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}:{line}: {phrase!r}; say: {say}"
        for line, phrase, say in idioms(path.read_text(encoding="utf-8"))
        if (name, phrase) not in ALLOWED
    ]


@pytest.mark.parametrize("place", PLACES)
def test_texts_speak_the_language_of_the_field(place):
    found = [line for path in texts(ROOT / place) for line in said(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "rewards a token",
        "Rewards\n    # a token",
        '"its log-probabilities differ by 3 nats " \n    "a token"',
        "seconds a step",
        "KL a token",
        "Cross-entropy a token",
        "one line a step",
        "One JSON object a line.",
        "two answers a prompt",
        "a page a setting",
        "a point an evaluation",
        "64 prompts a step",
        "one optimiser step an epoch",
        "one a sequence",
        "16 a device",
        "it takes 0.6 s an epoch",
        "the verdict was good",
        "it walks the road",
        "it goes on bit for bit",
        "mean 0 and deviation 1",
        "88% ended by themselves",
        "Only the first process writes",
        "mend the reward",
        "how long it takes on so many GPUs",
        "stages 1 to 7",
        "'a' is no address of a server",
        "the same results, but for times",
        "the score less the mean of its group",
        "and the run goes on without them",
        "a value counts once an item",
        "the weighted sum, less `missing_eos_penalty`",
        "it waits for ever",
        "damaged and passed over, is passed over",
        "it went back to step 3",
        "a GPU where there is one",
        "No number is ever made up",
        "def test_a_run_goes_on_bit_for_bit(settings):",
    ],
)
def test_idioms_are_found(text):
    assert idioms(text)


@pytest.mark.parametrize(
    "text",
    [
        "for a token of a step in a run",
        "which prompts a step trains on",
        "on the same number of processes a run resumes bit-exactly",
        "the end of a sequence\n\nA token",
        "it makes a step, then loads a model and names a token",
        "after step 3 a token was sampled",
        "it's a step",
        "the time a step takes",
        "score an answer, answer an item, rate a response",
        "learns from 320 preferences to score a summary",
        "with a vocabulary of 152,000 a token takes 19 KB",
        "once a minibatch's KL is above it",
        "DeepSpeed ZeRO stage 3",
        "recommended and amended",
        "one line per step, two answers per prompt, per-token rewards",
        "there is no checkpoint, and it is no longer needed",
        "nothing but the wheel, all but one",
        "test_a_run_that_died_resumes_bit_exactly",
        "max_falling_verdicts",
    ],
)
def test_plain_sentences_are_left_alone(text):
    assert not idioms(text)


def test_a_phrase_is_reported_with_its_line_and_what_to_say():
    assert idioms("First.\n\nThe mean of rewards\na token.") == [
        (3, "rewards a token", "per-token ..., ... per step")
    ]


@pytest.mark.parametrize(("name", "phrase"), sorted(ALLOWED))
def test_an_exception_is_still_needed(name, phrase):
    assert phrase in {said for _, said, _ in idioms((ROOT / name).read_text(encoding="utf-8"))}


def test_no_page_has_a_place_holder():
    """A word such as A_NAME outside code is text that was never written."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for page in pages:
        text = re.sub(
            r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$", "", page.read_text(encoding="utf-8"), flags=re.S
        )
        assert re.findall(r"(?m)(?:^|\. )[A-Z]{2,}_[A-Z_]+$|\bTBD\b", text) == [], page
