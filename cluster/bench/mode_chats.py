"""Conversations for `tandem bench modes`: questions whose answers are in the text, in the words of everyday.

Invariant: a conversation is a function of the random generator that it is given. Even a tiny model that was trained on
such questions answers them, so that drafts meet real answers.
"""

from __future__ import annotations

from random import Random

Message = dict[str, str]

_NAMES = ("Mia", "Otto", "Lena", "Paul", "Nora", "Emil", "Clara", "Hugo", "Ida", "Felix", "Rosa", "Anton")
_KINDS = (
    ("{name} lives in {value}.", "Where does {name} live?", ("Oslo", "Lima", "Cairo", "Rome", "Tokyo", "Dublin")),
    ("{name} works as a {value}.", "What does {name} work as?", ("baker", "pilot", "nurse", "tailor", "painter")),
    ("{name} has a {value}.", "Which animal does {name} have?", ("goat", "cat", "horse", "parrot", "rabbit")),
    ("The code of {name} is {value}.", "What is the code of {name}?", ()),
)


def recall(rng: Random, facts: int) -> tuple[str, list[str]]:
    """`facts` sentences, and the questions that they answer, in random order."""
    told: list[tuple[str, str]] = []
    for name in rng.sample(_NAMES, k=min(facts, len(_NAMES))):
        statement, question, values = rng.choice(_KINDS)
        value = rng.choice(values) if values else str(rng.randint(100, 9999))
        told.append((statement.format(name=name, value=value), question.format(name=name)))
    return " ".join(statement for statement, _ in told), rng.sample([question for _, question in told], k=len(told))


def single_turns(rng: Random, count: int) -> list[list[Message]]:
    """`count` conversations of one question: a fact to recall, facts to tell again, numbers to count."""
    chats: list[str] = []
    for number in range(count):
        text, questions = recall(rng, rng.randint(3, 8))
        start = rng.randint(1, 60)
        chats.append(
            (
                f"{text} {questions[0]}",
                f"{text} Tell me that again.",
                f"Count from {start} to {start + rng.randint(5, 9)}.",
            )[number % 3]
        )
    return [[{"role": "user", "content": chat}] for chat in chats]


def three_turns(rng: Random) -> list[str]:
    """What the user says in a chat of three turns."""
    text, questions = recall(rng, 12)
    return [f"{text} {questions[0]}", *questions[1:3]]
