"""The questions that the tiny model learns to answer: templates crossed with topics."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product

KINDS = (
    "animals", "fruits", "vegetables", "birds", "fish", "trees", "flowers", "cities", "rivers", "countries", "sports",
    "musical instruments", "colours", "games", "books", "jobs", "tools", "drinks", "desserts", "clothes", "planets",
    "languages", "holidays", "hobbies", "kitchen items", "ways to save water", "ways to relax", "gifts for a friend",
    "healthy snacks", "things to see in a park",
)  # fmt: skip
SUBJECTS = (
    "rain", "gravity", "sleep", "music", "the moon", "the sun", "snow", "wind", "a rainbow", "a volcano", "the ocean",
    "a library", "a bridge", "bread", "coffee", "honey", "salt", "paper", "glass", "a clock", "a train", "a bicycle",
    "a computer", "money", "friendship", "history", "mathematics", "art", "a garden", "the heart",
)  # fmt: skip
HEROES = (
    "a lighthouse keeper", "an old teacher", "a young girl", "a lost dog", "a tired baker", "a shy robot", "a sailor",
    "a young prince", "a clever fox", "a retired doctor", "a small village", "a painter",
)  # fmt: skip
EVENTS = ("a letter", "a hidden door", "an old map", "a strange song", "a golden key", "a new friend", "a storm")
ACTIVITIES = (
    "cooking", "running", "hiking", "painting", "gardening", "chess", "swimming", "reading", "camping", "photography",
    "dancing", "fishing", "learning a language", "making new friends", "a quiet weekend at home", "a trip to the sea",
    "a two-day hike", "a picnic", "a long flight", "a new job",
)  # fmt: skip
SENTENCES = (
    "The shop opens at nine.", "I like the garden.", "Where is the station?", "The train is late.", "She reads a book.",
    "We eat bread and cheese.", "The weather is cold today.", "My brother lives in Paris.", "The library is free.",
    "Good morning, my friend.", "The cat sleeps on the chair.", "Can you help me?",
)  # fmt: skip
TASKS = (
    "adds two numbers", "reverses a string", "finds the largest number in a list", "counts the vowels in a word",
    "checks whether a number is even", "returns the n-th square", "sums a list", "computes a factorial",
    "sorts a list of names", "removes spaces from a string",
)  # fmt: skip
OPPOSITES = (
    "hot",
    "big",
    "fast",
    "happy",
    "early",
    "light",
    "open",
    "old",
    "hard",
    "near",
    "full",
    "loud",
    "wet",
    "up",
)
COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Germany", "India", "China", "Canada", "Greece", "Norway")
FACTS = (
    "Bees visit flowers to collect nectar. They carry pollen from one flower to the next.",
    "Rivers carry sand to the sea. The sand forms beaches.",
    "The museum was built in 1920. It was closed for ten years and has now opened again.",
    "Trees take in carbon dioxide. They give out oxygen, which animals breathe.",
    "The team lost its first game. It won all the others and took the cup.",
    "Glass is made from sand. The sand is melted in a very hot oven.",
)

TEMPLATES: tuple[tuple[str, tuple[Iterable[object], ...]], ...] = (
    ("{} three {}.", (("Name", "List", "Give me"), KINDS)),
    ("List five {}.", (KINDS,)),
    ("Which of all {} do you like best, and why?", (KINDS,)),
    ("Answer in one sentence: {} {}?", (("what is", "why do people like", "how would you describe"), SUBJECTS)),
    ("Explain {} in two sentences.", (SUBJECTS,)),
    ("What causes {}?", (("tides", "rain", "wind", "thunder", "earthquakes", "waves", "the seasons", "night"),)),
    ("Why is {} important?", (SUBJECTS,)),
    ("Write one line of a poem about {}.", (SUBJECTS,)),
    ("Write the opening of a short story about {} who finds {}.", (HEROES, EVENTS)),
    ("Write a very short story about {} and {}.", (HEROES, EVENTS)),
    ("Give me one tip for {}.", (ACTIVITIES,)),
    ("What do I need for {}?", (ACTIVITIES,)),
    ("I feel {} today. {}", (("lonely", "tired", "happy", "bored", "sad"), ("What could I do?", "Any advice?"))),
    ("What is {} {} {}?", (range(2, 13), ("plus", "times"), range(3, 13, 3))),
    ("A train travels {} km in {} hours. What is its average speed?", (range(60, 301, 40), range(2, 6))),
    ("I have {} apples and eat {}. How many are left?", (range(5, 13), range(1, 5))),
    ("Translate into {}: {}", (("French", "Spanish", "German"), SENTENCES)),
    ("Write a Python function that {}.", (TASKS,)),
    ("Answer with one word: what is the opposite of {}?", (OPPOSITES,)),
    ("Answer with one word: what is the capital of {}?", (COUNTRIES,)),
    ("Answer yes or no: is {} {}?", (SUBJECTS, ("useful", "old"))),
    ("Summarise in one sentence: {}", (FACTS,)),
)  # fmt: skip


def prompts(seed: int) -> list[str]:
    """Every template with every combination of its topics, shuffled."""
    texts = [template.format(*topics) for template, choices in TEMPLATES for topics in product(*choices)]
    random.Random(seed).shuffle(texts)
    return texts
