"""Which generators of reasoning-gym score soundly (version 0.1.25, default settings).

A generator is allowed where its own answers score 1 after a round trip through JSON, where the empty text,
plain words, junk and huge numbers score low without an error, and where scoring evaluates neither the answer
nor the entry as Python. Some that are allowed are easy to guess: a best constant answer tells. `make
test-peer` tries all of them, and shows for each excluded one that its reason holds.
"""

from __future__ import annotations

NAMES = """
ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf binary_alternation caesar_cipher
chain_sum circuit_logic color_cube_rotation complex_arithmetic count_bits count_primes
course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships
figlet_font fraction_simplification futoshiki gcd group_anagrams gsm_symbolic isomorphic_strings jugs
kakurasu knight_swap knights_knaves largest_island lcm leg_counting letter_counting letter_jumble
list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack
number_filtering number_format number_sequence palindrome_generation palindrome_partitioning path_star
polynomial_equations pool_matrix power_function products quantum_lock ransom_note rectangle_count
rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations
simple_geometry sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo
syllogism tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting
zebra_puzzles
"""
ALLOWED = frozenset(NAMES.split())
EVALUATES = "it evaluates the answer as Python, so that a policy could run code"
EVALUATES_ENTRY = "it evaluates its entry as Python, so that data could run code"
LOSES = "its entries do not survive JSON: their own answers score about 0"
NO_ANSWER = "its entries have no answer that scores 1"
RAISES = "it raises on an answer of another form"
RAISES_HUGE = "it raises on a huge number, so that a policy could escape its score"
EXCLUDED = {
    "arc_agi": LOSES,
    "binary_matrix": EVALUATES,
    "bitwise_arithmetic": EVALUATES_ENTRY,
    "boxnet": RAISES,
    "calendar_arithmetic": RAISES_HUGE,
    "codeio": "its entries are made by running snippets of code",
    "coin_flip": "the answer 0 is right wherever the probability is below 1",
    "composite": "it has no task of its own",
    "countdown": EVALUATES,
    "game_of_life": "a wrong board scores 0.9 and more, by its dead cells",
    "game_of_life_halting": "any text is right",
    "graph_color": LOSES,
    "intermediate_integration": EVALUATES,
    "n_queens": EVALUATES,
    "number_sorting": EVALUATES_ENTRY,
    "polynomial_multiplication": EVALUATES,
    "prime_factorization": RAISES,
    "propositional_logic": NO_ANSWER,
    "puzzle24": f"any expression that makes 24 is right, whatever the numbers; {EVALUATES}",
    "rearc": LOSES,
    "rubiks_cube": NO_ANSWER,
    "rush_hour": NO_ANSWER,
    "simple_integration": EVALUATES,
    "spiral_matrix": EVALUATES,
    "string_insertion": EVALUATES,
    "time_intervals": RAISES_HUGE,
}


def check_generator(name: str) -> None:
    """Raise a ValueError for a generator that does not score soundly, or is unknown."""
    if name in EXCLUDED:
        raise ValueError(f"reasoning_gym:{name} is not offered as a reward: {EXCLUDED[name]}")
    if name not in ALLOWED:
        raise ValueError(
            f"reasoning_gym has no generator {name!r} that is known to score soundly; those are: "
            + ", ".join(sorted(ALLOWED))
        )
