"""The scripted conversation of `tandem demo`.

Owns the three requests: the second continues the first, the third shares only its system prompt. Invariant: decoding is
greedy, so the texts depend on the model alone, not on speculation, reuse or the worker. Used by `cluster.cli.demo`.
"""

from dataclasses import dataclass

SYSTEM = (
    "You are a helpful assistant who explains the natural world. Use plain words, stay with facts that are well known, "
    "and keep each answer to two or three short sentences."
)
MAX_TOKENS = 96

Message = dict[str, str]
"""`role` and `content`."""


@dataclass(frozen=True)
class Turn:
    """One request: what the user says, and whether the conversation so far goes before it."""

    title: str
    user: str
    continues: bool

    def messages(self, so_far: list[Message]) -> list[Message]:
        """The conversation to send; `so_far` ends with the answer to the turn before."""
        before = so_far if self.continues else [{"role": "system", "content": SYSTEM}]
        return [*before, {"role": "user", "content": self.user}]


TURNS = (
    Turn("a new conversation", "Why do we need to sleep?", continues=False),
    Turn("continues it", "And what happens if we sleep too little?", continues=True),
    Turn("another conversation under the same system prompt", "What is photosynthesis?", continues=False),
)
