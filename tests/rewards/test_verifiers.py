"""Verifiable rewards: right answers score 1, gaming scores 0, unusable references are refused with their row."""

import importlib.util
import json
import math
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from proxima.config import PPOConfig, RewardSpec, check_trust
from proxima.core.types import Prompt
from proxima.pages.report import summary, write_report
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples, check_rewards, worker_process
from proxima.rewards.code_program import pack, unpack
from proxima.rewards.code_tests import program_in
from proxima.rewards.graders import chosen_letter, final_answer, offers_several
from proxima.rewards.gym_generators import ALLOWED, EXCLUDED
from proxima.rewards.reward_sources import is_ready_made
from proxima.rewards.verifiers import open_verifier
from proxima.rewards.worker_child import release_of
from proxima.rewards.worker_process import WorkerProcess
from proxima.runs import Run
from tests.helpers import Crash, crash_at

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need Linux or macOS")


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def opened(source, **options):
    return open_verifier(RewardSpec(source, options=options))


def rows(column, references):
    return [Prompt(f"p{i}", {column: reference}) for i, reference in enumerate(references)]


def scores(verifier, column, references, completions):
    prompts = rows(column, references)
    verifier.check(prompts)
    count = len(prompts)
    return verifier(Samples(prompts, completions, [[1]] * count, [True] * count)).sequence


# --- choice ---

CHOICES = [
    *(("B", "B"), ("(b)", "B"), ("B.", "B"), ("B) because", "B"), ("B\nfor it is so", "B"), ("**C**", "C")),
    *(("The answer is D.", "D"), ("Answer: (a)", "A"), ("answer is A. No, the answer is C", "C")),
    *((r"so \boxed{E}", "E"), (r"\boxed{\text{(A)}}", "A"), ("<answer>C</answer> not B", "C")),
    *(
        ("A B C D", ""),
        ("A or D", ""),
        ("A cat sat", ""),
        ("", ""),
        ("I do not know", ""),
        ("answers vary", ""),
        ("The answer is a cat", ""),
    ),
]


@pytest.mark.parametrize(("completion", "letter"), CHOICES)
def test_one_letter_is_read_from_an_answer(completion, letter):
    assert chosen_letter(completion) == letter


@pytest.mark.parametrize("space", [" ", "\n", " \n", "\t"])
def test_an_answer_of_white_space_takes_no_time(space):
    """Cubic time was 5 s, in the trainer's own process."""
    for text in ("A_x", "\\boxed_{_(_A_x", "answer_is_x", "_*(_A_)_x"):
        begin = time.process_time()
        assert chosen_letter(text.replace("_", space * 800)) in ("", "A")
        assert time.process_time() - begin < 1


def test_choice_scores_and_its_best_constant_is_the_commonest_letter():
    verifier = opened("choice")
    assert scores(verifier, "answer", ["A", "b", "C"], ["A", "The answer is B", "A"]) == [1.0, 1.0, 0.0]
    best = verifier.best_constant(rows("answer", "AABC" + "A"))
    assert (best.answer, best.score) == ("A", 0.6)
    for reference in ("AB", "", 2, None):
        with pytest.raises(ValueError, match=r"reference of prompt 11 \('p1'\).*one letter"):
            opened("choice").check(rows("answer", ["A", reference]), 10)
    with pytest.raises(ValueError, match="needs the column 'right'"):
        opened("choice", column="right").check(rows("answer", ["A"]))


# --- math ---


@needs("math_verify")
def test_math_compares_as_mathematics():
    verifier = opened("math", workers=1, timeout=20.0)
    matrix = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"
    references = ["42", 7, r"\frac{1}{2}", "They add up.\n#### 1,000", "(3,4)", r"2\sqrt{3}", "42", "42"]
    references += [matrix, r"10\text{ cm}", r"\text{Friday}", r"\$18"]
    answers = ["so 42.", "8", "0.5", "It is $1000$", "$(3, 4)$", r"2\sqrt{3}", "42 or 41", ""]
    answers += [rf"\boxed{{{matrix}}}", r"\boxed{10}", r"\boxed{\text{Monday}}", r"\boxed{18}"]
    assert scores(verifier, "answer", references, answers) == [1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1]
    best = verifier.best_constant(rows("answer", ["42", "42", "7"]))
    assert (best.answer, best.score) == ("42", pytest.approx(2 / 3))


READINGS = [  # answer, reference, score: what decides is the last box, the last answer, the last line
    (r"\boxed{3}. Wait, no: \boxed{4}", "4", 1),
    (r"\boxed{3}. Wait, no: \boxed{4}", "3", 0),
    (r"\boxed{3} or \boxed{4}", "3", 0),
    (r"\boxed{3} or \boxed{4}", "4", 0),
    (r"\boxed{3}, $\boxed{4}$ and \boxed{5}", "5", 0),
    (r"\boxed{3} and \boxed{4}", "3,4", 1),
    (r"\boxed{5}, \boxed{5}", "5", 1),
    (r"\boxed{3,4}", "4", 0),
    (r"\boxed{3 \text{ or } 4}", "3", 0),
    (r"\boxed{either 3 or 4}", "4", 0),
    (r"\boxed{x = 1 \text{ or } x = 2}", "1,2", 1),
    (r"\boxed{0 1 2 3 4 5 6 7 8 9}", "9", 0),
    (r"\boxed{3} \boxed{4", "3", 0),
    (r"\boxed{4", "4", 0),
    (r"\boxed{}", "0", 0),
    (r"the answer is 3, I mean \boxed{4}", "3", 0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    ("The answer is 3 or 4", "3", 0),
    ("The answer is either 3 or maybe 4.", "4", 0),
    ("The answer is 3, or 4", "4", 0),
    ("The answer is 4. The answer is 3.", "4", 0),
    ("The answer is 4. The answer is 3.", "3", 1),
    ("$3$ or $4$", "4", 0),
    ("3|4", "4", 0),
    ("0 1 2 3 4 5 6 7 8 9", "9", 0),
    ("0, 1, 2, 3, 4, 5, 6, 7, 8, 9", "9", 0),
    ("0,1,2,3,4,5", "5", 0),
    ("It is 3.\nOr 4.\nOr 5.", "3", 0),
    ("blah 5\nThe answer is 72.\nHope this helps!", "72", 1),
    ("3 + 4 = 7, so 7 * 6 = 42", "42", 1),
    ("Either way, the total is 42", "42", 1),
    ("In 2020, 15 people came", "15", 1),
    ("The answer is 12 apples or so.", "12", 1),
    ("#### 72", "72", 1),
]


@needs("math_verify")
def test_one_part_of_an_answer_decides_and_one_that_leaves_it_open_scores_0():
    verifier = opened("math", timeout=20.0)
    answers, references, _ = zip(*READINGS, strict=True)
    found = scores(verifier, "answer", references, list(answers))
    assert [each for each, score in zip(READINGS, found, strict=True) if each[2] != score] == []


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "1 ", "or ", "a or ", "answer ", "\\boxed{1} ", "\n1"])
def test_reading_an_answer_takes_linear_time(piece):
    began = time.process_time()
    offers_several(final_answer(piece * 50_000))
    assert time.process_time() - began < 2


@needs("math_verify")
@pytest.mark.parametrize("reference", ["Yes", "", "\\frac{", True, None, r"\text{Friday} x yz"])
def test_a_reference_that_math_cannot_read_is_refused_with_its_row(reference):
    with pytest.raises(ValueError, match=r"cannot use the reference of prompt 1 \('p1'\)"):
        opened("math", timeout=20.0).check(rows("answer", ["1", reference]))


def test_no_answer_pays_for_the_import_of_its_grader(tmp_path, monkeypatch):
    """With its deadline: each new worker's first answers would be nan on a busy machine."""
    (tmp_path / "math_verify.py").write_text(
        "import time\ntime.sleep(3)\nparse = lambda text, **_: [text]\nverify = lambda *_, **__: True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    verifier = opened("math", timeout=2.5)
    assert verifier(Samples(rows("answer", ["42"]), ["42"], [[1]], [True])).sequence == [1.0]


@needs("math_verify")
def test_an_answer_on_which_the_grader_hangs_is_nan():
    verifier = opened("math", timeout=3.0)
    answers = [r"\boxed{9^{9^{9^9}}}", "42"]
    began = time.monotonic()
    outcome = verifier(Samples(rows("answer", ["42", "42"]), answers, [[1]] * 2, [True] * 2))
    assert time.monotonic() - began < 60
    assert math.isnan(outcome.sequence[0])
    assert outcome.sequence[1] == 1
    assert outcome.reason == "1 timeout; no answer within 3 s"


# --- JSON ---

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@needs("jsonschema")
def test_json_schema_takes_all_of_the_answer_or_one_block(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    answers = [
        '{"a": 1}',
        '```json\n{"a": 2}\n```',
        '{"a": "x"}',
        '{"a": 1, "a": 2}',
        '{"a": 1} done',
        "[" * 10**5,
    ]
    wanted = [1, 1, 0, 0, 0, 0]
    assert scores(opened("json_schema", schema=str(tmp_path / "s.json")), "x", [0] * 6, answers) == wanted
    assert scores(opened("json_schema", column="schema"), "schema", [SCHEMA] * 6, answers) == wanted
    easy = opened("json_schema", column="schema")
    assert easy.best_constant(rows("schema", [{"type": "object"}, {}])).score == 1.0


@needs("jsonschema")
def test_a_schema_that_is_none_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text('{"type": "objekt"}')
    (tmp_path / "no.json").write_text("{")
    for name, words in (("bad", "not a JSON Schema"), ("no", "not JSON"), ("none", "cannot read")):
        with pytest.raises(ValueError, match=words):
            opened("json_schema", schema=str(tmp_path / f"{name}.json"))
    with pytest.raises(ValueError, match="either schema=FILE or column=NAME"):
        opened("json_schema")
    for nowhere in ({"$ref": "http://127.0.0.1:1/x"}, {"$ref": "#/$defs/none"}, {"$dynamicRef": "#none"}):
        for schema in (nowhere, {"properties": {"a": {"items": nowhere}}}):
            with pytest.raises(ValueError, match="reference of prompt 0"):
                opened("json_schema", column="schema").check(rows("schema", [schema]))


@needs("jsonschema")
def test_references_inside_of_a_schema_are_followed():
    number = {"type": "number", "multipleOf": 0.01}
    sound = [
        {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": number}},
        {"$id": "http://x/a.json", "$defs": {"n": {"$id": "n.json", **number}}, "items": {"$ref": "n.json"}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": number}}
        | {"items": {"$ref": "#/definitions/n"}},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$dynamicAnchor": "node", "items": {"$dynamicRef": "#node"}},
        {"properties": {"$ref": number, "a": {"enum": [{"$ref": "#/no/reference"}]}}},
    ]
    opened("json_schema", column="schema").check(rows("schema", sound))


@needs("jsonschema")
def test_no_answer_escapes_its_schema_by_its_depth_or_size():
    """The library raises on these, and a grader that raises gives nan."""
    schemas = [{"items": {"$ref": "#"}}, {"multipleOf": 0.01}, {"multipleOf": 0.01}]
    answers = ["[" * 900 + "]" * 900, "1" + "0" * 400, "1e400"]
    assert scores(opened("json_schema", column="schema"), "schema", schemas, answers) == [0.0] * 3


# --- code ---

DOUBLE = "def f(x):\n    return tuple(2 * i for i in x) if isinstance(x, tuple) else 2 * x\n"
TESTS = ["assert f(2) == 4", "assert f((1, 2)) == (2, 4)"]
FORGERIES = {
    "wrong": "def f(x): return 5",
    "nothing": "",
    "prose": "I cannot do this.",
    "leaves": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "equal to all": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "list that lies": "class L(list):\n    def __eq__(self, other): return True\ndef f(x): return L()",
    "own builtins": "def tuple(x): return 0\ndef f(x): return 1",
    "rewrites the tests": "import os\nfor n in os.listdir('.'):\n    open(n, 'w').write('pass')\ndef f(x): return 1",
    "reads the tests": "import re\ndef f(x):\n    text = open('tests.py').read()\n"
    "    return eval(re.search(re.escape(f'f({x!r}) == ') + r'(.*)', text)[1])",
    "kills the tests": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return 1",
    "speaks for the tests": 'import os\nfor n in range(3, 64):\n    try: os.write(n, b\'{"id": 2, "value": 1.0}\\n\')\n'
    "    except OSError: pass\ndef f(x): return 1",
    "eats memory": "x = bytearray(2**36)\n" + DOUBLE,
    "crashes": "import ctypes\nctypes.string_at(0)\n" + DOUBLE,
}


@pytest.fixture(scope="module")
def coder():
    return opened("code", timeout=5.0, workers=2)


@pytest.mark.parametrize("tests", [TESTS, "\n".join(TESTS)])
def test_a_program_that_passes_scores_1(coder, tests):
    answers = [DOUBLE, f"Here:\n```python\n{DOUBLE}```\nDone.", DOUBLE.replace("f(", "candidate(")]
    if isinstance(tests, str):
        tests = tests.replace("f(", "candidate(")
        answers = [DOUBLE]
    else:
        answers = answers[:2]
    assert scores(coder, "tests", [tests] * len(answers), answers) == [1.0] * len(answers)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_that_does_not_scores_an_honest_0(coder, name):
    if name == "eats memory" and sys.platform != "linux":
        pytest.skip("no memory limit")
    began = time.monotonic()
    assert scores(coder, "tests", [TESTS], [FORGERIES[name]]) == [0.0]
    assert time.monotonic() - began < 5.0 + 5.0


def test_programs_that_hang_or_crash_are_counted_and_named_and_those_that_only_fail_are_not():
    coder = opened("code", timeout=1.5, workers=2)
    forged = [FORGERIES[name] for name in ("crashes", "leaves", "prose")]
    programs = [f"{DOUBLE}while True: pass", *forged, "def f(:", DOUBLE]
    outcome = coder(Samples(rows("tests", [TESTS] * 6), programs, [[1]] * 6, [True] * 6))
    assert outcome.sequence == [0.0] * 5 + [1.0]
    assert outcome.failures == 0
    assert set(outcome.failed_programs) == {0, 1}
    assert outcome.failed_programs[0] == "timeout: no answer within 1.5 s"
    assert outcome.failed_programs[1] == "crash: Segmentation fault"
    reads = [{"input": "", "output": ""}]
    outcome = coder(Samples(rows("tests", [reads]), ["import os\nos.abort()"], [[1]], [True]))
    assert outcome.failed_programs == {0: "crash: Aborted"}


def test_a_step_counts_the_programs_that_failed_and_the_log_says_how(make_config, monkeypatch, caplog):
    """A sandbox that does not work looks like a bad policy otherwise."""
    trainer = PPOTrainer(make_config(rewards=["code,timeout=20"]))
    assert trainer.ppo_step(rows("tests", ["assert f() == 1"] * 2))["failed_programs"] == 0
    ((_, coder),) = trainer.reward_computer.rewards
    monkeypatch.setattr(coder, "_grade", lambda *given: "exit: it could not be started: no room")
    results = trainer.ppo_step(rows("tests", ["assert f() == 1"] * 4))
    assert results["failed_programs"] == 4
    assert results["failed_rewards"] == 0
    assert "reward code: 4 of 4 programs failed and score 0: 4 x exit: it could not be started" in caplog.text
    assert "failed_programs" not in PPOTrainer(make_config(rewards=["choice"])).ppo_step(rows("answer", "AB"))


def test_the_one_function_is_the_candidate_beside_constants_and_under_conditions(coder):
    tests = ["assert candidate(2) == 4"]
    answers = [
        f"TWO = 2\n{DOUBLE}",
        "try:\n    def f(x): return 2 * x\nexcept Exception: pass",
        "f: object = lambda x: 2 * x",
        "def f(x): return 2 * x\nif __name__ == '__main__':\n    shown = f(3)",
    ]
    assert scores(coder, "tests", [tests] * 5, [*answers, f"{DOUBLE}def g(x): return x"]) == [1, 1, 1, 1, 0]


def test_programs_that_read_their_input(coder):
    tests = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}]
    add = "a, b = map(int, input().split())\nprint(a + b)"
    assert scores(coder, "tests", [tests] * 4, [add, "print(5)", add + "\nimport sys; sys.exit(1)", "x"]) == [
        1,
        0,
        0,
        0,
    ]


def test_a_program_that_prints_no_text_scores_0_and_a_grader_that_raises_nan(coder):
    tests = [{"input": "", "output": "1"}]
    prompts = rows("tests", [tests])
    printed = "import sys; sys.stdout.buffer.write(b'\\xff')"
    assert coder(Samples(prompts, [printed], [[1]], [True])).sequence == [0.0]
    outcome = coder(Samples(rows("tests", [7]), ["x = 1"], [[1]], [True]))
    assert math.isnan(outcome.sequence[0])
    assert "1 raised" in outcome.reason


@pytest.mark.parametrize(
    ("words", "release"),
    [("5.13.19-2", (5, 13)), ("6.18.44-fc", (6, 18)), ("4.18.0-553.el8", (4, 18)), ("odd", (0, 0))],
)
def test_the_release_of_a_kernel_says_what_it_counts(words, release):
    """What limits processes in an old one would bind all of the user's, or of the machine."""
    assert release_of(words) == release


def test_functions_see_plain_values_and_their_errors_are_those_of_the_tests(coder):
    tests = (
        "r = f({'a': [1, (2, 3)], 2: {4, 5}}, k=b'x')\n"
        "assert r == {'a': [1, (2, 3)], 2: {4, 5}, 'k': b'x', 'z': 1j}\n"
        "try:\n    f(None)\nexcept ValueError as e:\n    assert 'no' in str(e)\nelse:\n    assert False\n"
    )
    program = "def f(x, k=None):\n    if x is None: raise ValueError('no')\n    return {**x, 'k': k, 'z': 1j}"
    assert scores(coder, "tests", [tests], [program]) == [1.0]
    for value in ({1: (2, {3}), "a": [None, 1.5, frozenset({1})]}, b"\xff", 1j, [[]]):
        assert unpack(json.loads(json.dumps(pack(value)))) == value


REFUSED_TESTS = (
    ("f(1)", "assert nothing"),
    ("assert (", "not Python"),
    ("assert f(1)\nreturn 1", "not Python"),
    ([], "assert nothing"),
    ("", "assert nothing"),
    (5, "is needed"),
    (None, "is needed"),
    ("def check(candidate):\n    assert candidate(1) == 2", "they pass without a program"),
    (
        "import no_such_module\nassert f(1) == 2",
        "raise ModuleNotFoundError: No module named 'no_such_module'",
    ),
    ("raise SystemExit(3)\nassert f(1) == 2", "they raise SystemExit: 3"),
    ("while True: pass\nassert f(1) == 2", "timeout: no answer within 5 s"),
    ([{"input": "x"}], "needs an input and an output"),
    ([{"input": "x", "output": " \n"}], "no output is wanted"),
)


@pytest.mark.parametrize(("tests", "words"), REFUSED_TESTS)
def test_tests_that_cannot_grade_are_refused_with_their_row(coder, tests, words):
    with pytest.raises(ValueError, match="reference of prompt 8") as raised:
        coder.check(rows("tests", ["assert f(1)", tests]), first=7)
    assert words in str(raised.value)


PRINTED = [{"input": "2 3", "output": "5"}]
ADDS = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(
    ("tests", "solution", "words"),
    [
        (TESTS, DOUBLE, ""),
        (TESTS, None, ""),
        (PRINTED, ADDS, ""),
        (TESTS, "def f(x): return 3 * x", "does not pass"),
        (TESTS, "def f(:", "does not pass"),
        (TESTS, "import os\nos.abort()\ndef f(x): return 2 * x", "crash: Aborted"),
        (TESTS, [DOUBLE], "is a list, not text"),
        (PRINTED, "print(6)", "does not pass"),
    ],
)
def test_a_solution_beside_the_tests_must_pass_them(coder, tests, solution, words):
    prompt = Prompt("p", {"tests": tests, "solution": solution})
    other = opened("code", solution="other")
    other.check([prompt])
    if not words:
        coder.check([prompt])
        return
    with pytest.raises(ValueError, match="reference of prompt 3") as raised:
        coder.check([prompt], first=3)
    assert words in str(raised.value)


def test_a_constant_program_that_passes_is_shown(coder):
    passes = "try:\n    assert f(1)\nexcept NameError: pass\nelse:\n    assert False"
    assert coder.best_constant(rows("tests", [[passes], TESTS])).score == 0.5


def test_the_last_block_of_an_answer_is_its_program():
    assert program_in("a\n```python\nx\n```\nb\n```\ny\n```") == "y\n"
    assert program_in("```py\nx = 1") == "x = 1"
    assert program_in("x = 1") == "x = 1"


OUTWARD = """
import ctypes, os, socket, stat


def places():
    for top in ("/", "/tmp", "/var", "/var/tmp", "/run", "/sys", "/home", "/root", os.path.expanduser("~")):
        yield top
        try:
            yield from (entry.path for entry in os.scandir(top) if entry.is_dir() and entry.path != os.getcwd())
        except OSError:
            pass
    yield from (folder for folder, _, _ in os.walk("/dev"))


def writes(folder):
    if os.path.realpath(folder).startswith(("/proc", os.getcwd())):
        return False
    try:
        open(os.path.join(folder, "left-by-a-sandbox"), "x").close()
        return True
    except OSError:
        return False


def files_below(top):
    return [os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names]


def opens(path):
    if os.path.realpath(path).startswith("/proc"):  # its own open files
        return False
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        return True
    except OSError:
        return False


def look(TARGET, HOST, PORT):
    found = {}
    for name, attempt in {
        "folder": lambda: open("mine", "w").write("x"),
        "elsewhere": lambda: open(os.path.join(TARGET, "theirs"), "w").write("x"),
        "remount": lambda: os.system("mount -o remount,rw / 2>/dev/null") and 1 / 0,
        "rights": lambda: os.chmod("/dev/null", stat.S_IMODE(os.stat("/dev/null").st_mode)),
        "network": lambda: socket.create_connection((HOST, PORT), 2).close(),
        "namespace": lambda: ctypes.CDLL(None).unshare(0x10000000) and 1 / 0,
    }.items():
        try:
            attempt()
            found[name] = True
        except Exception:
            found[name] = False
    found["written"] = [path for path in places() if writes(path)]
    found["devices"] = [os.path.realpath(path) for path in files_below("/dev") if opens(path)]
    found["services"] = [*files_below("/run")]
    found["keys"] = "SECRET_KEY" in os.environ
    found["processes"] = len([n for n in os.listdir("/proc") if n.isdecimal()]) if os.path.isdir("/proc") else 0
    return found
"""


@pytest.mark.parametrize("with_bubblewrap", [True, False])
def test_code_of_the_policy_reaches_no_network_and_writes_only_in_its_folder(
    tmp_path, monkeypatch, with_bubblewrap
):
    if with_bubblewrap and not worker_process.bubblewrap():
        pytest.skip("bubblewrap is not installed, or may not work here")
    if not with_bubblewrap:
        monkeypatch.setattr(worker_process, "bubblewrap", lambda: None)
    monkeypatch.setenv("SECRET_KEY", "k")
    module, target = tmp_path / "module", tmp_path / "target"
    for folder in (module, target):
        folder.mkdir()
    (module / "outward.py").write_text(OUTWARD)
    monkeypatch.chdir(module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        WorkerProcess("outward:look", memory_mb=2048, network=False, sandbox=True) as worker,
    ):
        found = worker.call(None, str(target), *listener.getsockname(), timeout=20)
        closed = worker.protections
    assert found["folder"]
    assert not found["keys"]
    if not closed["files"] or not closed["network"]:
        pytest.skip(f"the kernel here allows less: {closed}")
    assert not found["elsewhere"]
    assert not found["remount"]
    assert not found["rights"]
    assert not found["namespace"]
    assert not found["network"]
    assert found["processes"] < 10
    assert found["written"] == []
    assert set(found["devices"]) <= {f"/dev/{name}" for name in ("null", "zero", "random", "urandom")}
    assert found["services"] == []
    assert not list(Path("/dev/shm").glob("left-by-a-sandbox"))
    assert list(target.iterdir()) == []


FORGES = """
import glob, os, time

def f(x):
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if not path.startswith(f"/proc/{os.getpid()}/"):
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b'{"id": 2, "value": 1.0}\\n')
        except OSError:
            pass
    time.sleep(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("with_bubblewrap", [True, False])
def test_a_program_cannot_write_its_own_grade(monkeypatch, with_bubblewrap):
    """The pipe of the replies is open in no process that it can see."""
    if with_bubblewrap and not worker_process.bubblewrap():
        pytest.skip("bubblewrap is not installed, or may not work here")
    if not with_bubblewrap:
        monkeypatch.setattr(worker_process, "bubblewrap", lambda: None)
    with WorkerProcess("proxima.rewards.code_tests:grade", memory_mb=1024, sandbox=True) as worker:
        assert worker.call(None, FORGES, "assert f(1) == 2", timeout=20) == 0.0


# --- reasoning-gym ---


def test_generators_that_score_unsoundly_are_refused_with_the_reason():
    assert not ALLOWED & set(EXCLUDED)
    for name, words in (
        ("game_of_life_halting", "any text is right"),
        ("countdown", "run code"),
        ("nonsense", "chain_sum"),
    ):
        with pytest.raises(ValueError, match=words):
            check_rewards(PPOConfig(rewards=[f"reasoning_gym:{name}"]))
    assert not RewardSpec("reasoning_gym:chain_sum").is_function
    assert RewardSpec("reasoning_gym:chain_sum").label == "chain_sum"


@needs("reasoning_gym")
def test_every_generator_is_either_allowed_or_excluded():
    from reasoning_gym.factory import DATASETS

    assert set(DATASETS) == ALLOWED | set(EXCLUDED)


@needs("reasoning_gym")
def test_a_generator_scores_its_own_entries():
    import reasoning_gym

    entries = [*reasoning_gym.create_dataset("chain_sum", size=4, seed=1)]
    prompts = [
        Prompt(each["question"], {"answer": each["answer"], "metadata": each["metadata"]}) for each in entries
    ]
    verifier = opened("reasoning_gym:chain_sum", timeout=30.0)
    verifier.check(prompts)
    answers = [entries[0]["answer"], f"so <answer>{entries[1]['answer']}</answer>", "no", ""]
    found = verifier(Samples(prompts, answers, [[1]] * 4, [True] * 4)).sequence
    assert found[:2] == [1.0, 1.0]
    assert max(found[2:]) < 0.1
    wrong = Prompt("q", {"answer": "x", "metadata": entries[0]["metadata"]})
    wrong.columns["answer"] = None
    with pytest.raises(ValueError, match="reference of prompt 4"):
        verifier.check([wrong], 4)


# --- in a run ---


def test_names_are_known_before_a_run_and_only_code_needs_trust(make_config):
    for source in ("math", "code", "json_schema", "choice", "reasoning_gym:chain_sum"):
        spec = RewardSpec(source)
        assert is_ready_made(spec)
        assert not spec.is_function
        assert spec.runs_code == (source == "code")
    with pytest.raises(ValueError, match="add --rewards"):
        check_trust("a run", PPOConfig(rewards=["code"]), ())
    check_trust("a run", PPOConfig(rewards=["choice", "math"]), ())
    with pytest.raises(ValueError, match="no option 'tries'"):
        check_rewards(PPOConfig(rewards=["choice,tries=3"]))


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("proxima.rewards.verifiers.find_spec", lambda name: None)
    for source, words in (
        ("math", r"pip install 'proxima-rlhf\[verify\]'"),
        ("json_schema,column=x", r"pip install 'proxima-rlhf\[verify\]'"),
        ("reasoning_gym:chain_sum", "pip install reasoning-gym"),
    ):
        with pytest.raises(ValueError, match=words):
            check_rewards(PPOConfig(rewards=[source]))


def test_a_step_is_trained_on_choices_and_a_bad_row_stops_the_run_before_it(make_config):
    trainer = PPOTrainer(make_config(rewards=["choice"]))
    results = trainer.ppo_step(rows("answer", "ABCD"))
    assert set(results["rewards"]) <= {0.0, 1.0}
    with pytest.raises(ValueError, match="reference of prompt 3"):
        trainer.train(rows("answer", ["A", "B", "C", "none"]))


def test_a_run_keeps_the_best_constant_answer_that_its_report_shows(make_config, capsys):
    """Asked once, before the first step; a resumed run keeps it."""
    prompts, settings = rows("answer", "AABC"), {"batch_size": 4, "checkpoint_every": 1, "run_name": "run"}
    killed = crash_at(PPOTrainer(make_config(rewards=["choice"], **settings)), 1)
    with pytest.raises(Crash):
        killed.train(prompts, num_epochs=2)
    assert "reward choice: the best constant answer 'A' scores 0.5\n" in capsys.readouterr().out
    run = Run(killed.config.run_dir + "/run")
    assert run.best_constants == {"choice": ("A", 0.5)}
    (run.path / "best_constants.json").write_text('{"choice": {"answer": "B", "score": 0.25}}')
    PPOTrainer(make_config(rewards=["choice"], **settings)).train(prompts, num_epochs=2, resume=True)
    assert "best constant" not in capsys.readouterr().out
    assert run.best_constants == {"choice": ("B", 0.25)}
    assert "best constant answer of choice" in write_report(run).read_text(encoding="utf-8")
    assert "'B', scores 0.25 by choice" in summary(run)
    (run.path / "best_constants.json").unlink()  # a run of before
    PPOTrainer(make_config(rewards=["choice"], **settings)).train(prompts, num_epochs=2, resume=True)
    assert run.best_constants == {"choice": ("A", 0.5)}


def test_other_rewards_have_no_constant_answer(make_config, prompts):
    results = PPOTrainer(make_config(batch_size=4)).train(prompts)
    assert not (results.run_folder / "best_constants.json").exists()
    assert Run(results.run_folder).best_constants == {}


def test_bubblewrap_that_does_not_work_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert shutil.which("bwrap") == str(tmp_path / "bwrap")
    assert worker_process.bubblewrap.__wrapped__() is None
