"""The closed vocabulary of the world. Each slot's values are phrases of whole words, none inside another of its slot."""

from __future__ import annotations

SLOTS: dict[str, tuple[str, ...]] = {
    "who": (
        "roommate", "boss", "sister", "brother", "girlfriend", "boyfriend", "neighbor", "landlord",
        "coworker", "mom", "dad", "friend", "cousin", "uncle", "teacher", "wife",
    ),
    "what": (
        "broke my laptop", "ate all my food", "read my diary", "forgot my birthday", "lied about money",
        "sold my bike", "kissed my ex", "lost my keys", "crashed my car", "stole my idea", "cut my hours",
        "yelled at me", "moved out", "quit smoking", "got a dog", "cancelled the trip", "wants a divorce",
        "owes me rent", "blames me for everything", "ignores my calls", "found a new job", "failed the exam",
        "burned the kitchen", "told everyone my secret",
    ),
    "when": (
        "last week", "two days ago", "a month ago", "this morning", "last summer", "three years ago",
        "on friday", "over christmas", "since june", "last night",
    ),
    "where": (
        "at work", "at home", "at a party", "in the car", "at the gym", "at school", "at a wedding",
        "on vacation", "at the bar", "online",
    ),
    "feeling": ("angry", "sad", "guilty", "scared", "confused", "jealous", "tired", "betrayed", "relieved", "lonely"),
    "ask": (
        "should i move out", "should i forgive them", "how do i get my money back", "should i call the police",
        "do i need a lawyer", "should i say sorry", "how do i start over", "should i tell my family",
        "is it my fault", "should i wait", "how do i stay calm", "should i look for help",
        "can i trust them again", "should i talk to them",
    ),
}  # fmt: skip
"""What a post may be about. `who`, `what` and `ask` are in every post; each of the others in about half."""

ALWAYS = ("who", "what", "ask")
SOMETIMES = ("when", "where", "feeling")

SUBREDDITS = ("relationships", "advice", "jobs", "personalfinance", "roommates", "family")

TITLES = (
    "need advice", "what would you do", "i need help with this", "not sure what to do", "long story", "am i wrong",
    "please help",
)  # fmt: skip

SENTENCES: dict[str, tuple[str, ...]] = {
    "event": (
        "my {who} {what}.", "so my {who} {what}.", "it turns out that my {who} {what}.",
        "i found out that my {who} {what}.", "you will not believe it but my {who} {what}.",
    ),
    "when": ("this was {when}.", "it happened {when}.", "it all started {when}."),
    "where": ("i was {where} when i found out.", "this happened {where}.", "we were {where}."),
    "feeling": ("now i feel {feeling}.", "it makes me feel {feeling}.", "to be honest i am {feeling}."),
    "ask": ("{ask}?", "so {ask}?", "now i wonder, {ask}?", "my question is, {ask}?"),
}  # fmt: skip
"""How a post says a fact."""

FILLER = (
    "sorry for the long post.", "english is not my first language.", "i am writing this on my phone.",
    "we used to get along well.", "i never thought this would happen to me.", "some background first.",
    "i do not know where to start.", "this is my first post here.", "thanks for reading.", "i made some tea first.",
    "we have known each other for a long time.", "i have not slept much.", "anyway.", "that is the whole story.",
    "i am using a new account for this.", "people say i worry too much.",
)  # fmt: skip

HEARSAY = (
    "my {who} says i should calm down.", "my {who} thinks it is funny.", "i asked my {who} and got no answer.",
    "nothing like this happened {when}.", "i would rather be {where}.", "my {who} would be {feeling} too.",
)  # fmt: skip
"""Filler that names other people, times, places and feelings: what a careless summary mixes up."""

OPENING = "basically,"
"""The opening that annotators like more than its content deserves: the documented bias of `Annotator`."""
