"""The benchmark's prompts: four kinds, eight of each, short enough for a small chat model to answer sensibly.

The kinds differ in how predictable an answer is, and with it in acceptance: code and arithmetic repeat themselves,
open chat does not.
"""

from dataclasses import dataclass
from typing import Literal, get_args

PromptKind = Literal["code", "instructions", "mathematics", "chat"]
KINDS: tuple[PromptKind, ...] = get_args(PromptKind)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One user message and what kind of answer it asks for."""

    kind: PromptKind
    text: str


WARM_UP = BenchPrompt("chat", "Say hello and tell me in two sentences what you can help me with.")

_TEXTS: dict[PromptKind, tuple[str, ...]] = {
    "code": (
        "Write a Python function `is_palindrome(text)` that ignores case and spaces. Add three example calls.",
        "Write a Python class `Stack` with the methods push, pop, peek and is_empty, each with a docstring.",
        "Write a JavaScript function that removes duplicate numbers from an array and keeps their order.",
        "Write a SQL statement that creates a table `books` with an id, a title, an author, a year and a price, "
        "then three INSERT statements that fill it.",
        "Write a Python function that reads a CSV file and returns the average of the column named `price`.",
        "Write an HTML page with a heading, a short paragraph, and a list of four links.",
        "Write a Python function that returns the first n Fibonacci numbers, then explain it line by line.",
        "Write a shell script that renames every .txt file in a folder to .md and prints each new name.",
    ),
    "instructions": (
        "Explain step by step how to make a cup of green tea.",
        "Give me a packing list for a weekend of camping in the mountains, grouped under short headings.",
        "Write a polite email to my landlord that asks for the kitchen tap to be repaired this week.",
        "Summarise in five bullet points why it is healthy to walk every day.",
        "Rewrite this sentence in a formal, a friendly and a very short way: "
        "I can't come to the meeting tomorrow because my train was cancelled.",
        "List the seven days of the week, and for each give one small habit that fits that day.",
        "Explain to a ten-year-old how a rainbow comes about, in simple words.",
        "Write a recipe for tomato soup with a list of ingredients and numbered steps.",
    ),
    "mathematics": (
        "A box holds 12 pencils. How many pencils are in 7 boxes? Explain each step.",
        "Write the multiplication table of 6, from 6 x 1 to 6 x 12, one line each.",
        "A train travels 180 kilometres in 3 hours. What is its average speed? Show how you work it out.",
        "Anna has 45 euros. She buys two books for 9 euros each and a pen for 4 euros. How much is left?",
        "What is 25% of 240? Explain two ways to work it out.",
        "List the square numbers from 1 to 144 and say what each is the square of.",
        "A garden is 8 metres long and 5 metres wide. Find its area and its perimeter, step by step.",
        "Count down from 60 to 0 in steps of 5, and then explain what the pattern is.",
    ),
    "chat": (
        "What would you do on a rainy Sunday with nothing planned?",
        "Tell me a short story about a lighthouse keeper who is afraid of the dark.",
        "I feel nervous about my first day at a new job. What would you say to me?",
        "Which is the better pet for a small flat, a cat or a dog, and why?",
        "Describe a market square early in the morning, so that I can picture it.",
        "If you could visit one place in history, which would it be and what would you look at first?",
        "Invent a holiday that does not exist yet and tell me how people celebrate it.",
        "What makes a good friend? Tell me what you think, with an example.",
    ),
}

PROMPTS: tuple[BenchPrompt, ...] = tuple(
    BenchPrompt(kind, texts[index]) for index in range(8) for kind, texts in _TEXTS.items()
)


def select_prompts(count: int) -> tuple[BenchPrompt, ...]:
    """The first `count` prompts, the kinds in turn, so that any four in a row hold one of each."""
    return PROMPTS[:count]
