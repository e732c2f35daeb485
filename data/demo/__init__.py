"""The embedded data set: generated word problems in OpenMathInstruct-2's columns, no file and no network.

Every row is a pure function of its split and number, so all machines train on the same text. Each solution
writes its steps as `a op b = c` with whole numbers, which is what the tests check.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

TOKENIZER_DIR = Path(__file__).parent / "tokenizer"
SIZES = {"train_1M": 6000, "test": 500}  # named as OpenMathInstruct-2 names them
ALIASES = {"train": "train_1M"}

WORD = re.compile(r"\S+")
NAMES = WORD.findall(
    "Ada Amir Anna Ben Bianca Carlos Chen Clara Daniel Deepa Diego Elena Emil Fatima Felix Grace Hana Hugo "
    "Ines Isaac Jamal Jana Kofi Laila Leo Lucia Marek Maya Mei Milan Nadia Noah Olga Omar Paula Pedro Priya "
    "Quinn Rahul Rosa Sam Sofia Tariq Tess Umar Vera Viktor Wanda Xavier Yara Yusuf Zoe"
)
THINGS = WORD.findall(
    "apples beads books bottles buttons candles cards coins cookies cups eggs erasers flowers kites lemons "
    "marbles notebooks oranges pencils pies plums postcards puzzles ribbons shells stamps stickers tickets"
)
PLACES = WORD.findall(
    "bakery school library market museum nursery workshop theatre farm harbour station club"
)

Problem = tuple[str, list[str], int]  # question, steps, answer


def shopping(r: random.Random) -> Problem:
    name, (a, b) = r.choice(NAMES), r.sample(THINGS, 2)
    n, m, price, cost = r.randint(2, 12), r.randint(2, 12), r.randint(2, 15), r.randint(2, 15)
    first, second = n * price, m * cost
    question = (
        f"At the {r.choice(PLACES)} {name} buys {n} {a} for ${price} each and {m} {b} for ${cost} each. "
        f"How many dollars does {name} spend in all?"
    )
    steps = [
        f"The {a} cost {n} * {price} = {first} dollars.",
        f"The {b} cost {m} * {cost} = {second} dollars.",
        f"Together that is {first} + {second} = {first + second} dollars.",
    ]
    return question, steps, first + second


def change(r: random.Random) -> Problem:
    name, thing = r.choice(NAMES), r.choice(THINGS)
    n, price = r.randint(2, 9), r.randint(2, 9)
    paid = n * price + r.randint(1, 40)
    question = (
        f"{name} pays for {n} {thing} with ${paid}. Each one costs ${price}. How much change does {name} get?"
    )
    steps = [
        f"All the {thing} cost {n} * {price} = {n * price} dollars.",
        f"The change is {paid} - {n * price} = {paid - n * price} dollars.",
    ]
    return question, steps, paid - n * price


def sharing(r: random.Random) -> Problem:
    name, thing = r.choice(NAMES), r.choice(THINGS)
    friends, each, kept = r.randint(3, 12), r.randint(3, 25), r.randint(1, 30)
    total = friends * each + kept
    question = (
        f"{name} has {total} {thing}, keeps {kept} of them and shares the rest equally among "
        f"{friends} friends. How many {thing} does each friend get?"
    )
    steps = [
        f"There are {total} - {kept} = {friends * each} {thing} to share.",
        f"Each friend gets {friends * each} / {friends} = {each} {thing}.",
    ]
    return question, steps, each


def twice_as_many(r: random.Random) -> Problem:
    (a, b), thing = r.sample(NAMES, 2), r.choice(THINGS)
    n, (times, word) = r.randint(4, 60), r.choice(((2, "twice"), (3, "three times"), (4, "four times")))
    question = (
        f"{a} sold {n} {thing} in April and {b} sold {word} as many. "
        f"How many {thing} did {a} and {b} sell altogether?"
    )
    steps = [
        f"{b} sold {n} * {times} = {n * times} {thing}.",
        f"Altogether they sold {n} + {n * times} = {n + n * times} {thing}.",
    ]
    return question, steps, n + n * times


def half_left(r: random.Random) -> Problem:
    name, thing = r.choice(NAMES), r.choice(THINGS)
    half, more = r.randint(10, 80), r.randint(1, 9)
    question = (
        f"{name} had {2 * half} {thing} and gave half of them to the {r.choice(PLACES)}. "
        f"Later {name} lost {more} more. How many {thing} are left?"
    )
    steps = [
        f"{name} gave away {2 * half} / 2 = {half} {thing}, so {2 * half} - {half} = {half} were left.",
        f"After losing {more} there are {half} - {more} = {half - more} {thing}.",
    ]
    return question, steps, half - more


def travel(r: random.Random) -> Problem:
    name, vehicle = r.choice(NAMES), r.choice(("bicycle", "bus", "train", "car", "boat"))
    speed, hours, slow, more = 5 * r.randint(3, 18), r.randint(2, 6), 5 * r.randint(2, 9), r.randint(1, 4)
    far, near = speed * hours, slow * more
    question = (
        f"{name} travels by {vehicle} for {hours} hours at {speed} km per hour, then for {more} more "
        f"hours at {slow} km per hour. How many kilometres is that?"
    )
    steps = [
        f"The first part is {speed} * {hours} = {far} km.",
        f"The second part is {slow} * {more} = {near} km.",
        f"In total {name} travels {far} + {near} = {far + near} km.",
    ]
    return question, steps, far + near


def wages(r: random.Random) -> Problem:
    name, hourly, days, hours, spent = (
        r.choice(NAMES),
        r.randint(9, 30),
        r.randint(2, 6),
        r.randint(3, 9),
        r.randint(5, 50),
    )
    worked = days * hours
    question = (
        f"{name} earns ${hourly} an hour at the {r.choice(PLACES)} and works {hours} hours a day for "
        f"{days} days. Then {name} spends ${spent}. How many dollars remain?"
    )
    steps = [
        f"{name} works {hours} * {days} = {worked} hours.",
        f"That pays {worked} * {hourly} = {worked * hourly} dollars.",
        f"After spending there remain {worked * hourly} - {spent} = {worked * hourly - spent} dollars.",
    ]
    return question, steps, worked * hourly - spent


def rectangle(r: random.Random) -> Problem:
    place, a, b = (
        r.choice(("garden", "field", "hall", "playground", "kitchen")),
        r.randint(3, 40),
        r.randint(3, 40),
    )
    shape = f"A rectangular {place} is {a} metres long and {b} metres wide."
    if r.random() < 0.5:
        question = f"{shape} What is its area in square metres?"
        return question, [f"The area is length times width: {a} * {b} = {a * b} square metres."], a * b
    question = f"{shape} How long is a fence around it in metres?"
    steps = [
        f"One long and one short side make {a} + {b} = {a + b} metres.",
        f"All the way round it is 2 * {a + b} = {2 * (a + b)} metres.",
    ]
    return question, steps, 2 * (a + b)


def percentage(r: random.Random) -> Problem:
    thing, percent = r.choice(THINGS), r.choice((10, 20, 25, 50, 75))
    total = 20 * r.randint(2, 30)
    part = total * percent // 100
    question = (
        f"The {r.choice(PLACES)} has {total} {thing} and sells {percent}% of them on Monday. "
        f"How many {thing} are left on Tuesday?"
    )
    steps = [
        f"On Monday {total} * {percent} / 100 = {part} {thing} are sold.",
        f"That leaves {total} - {part} = {total - part} {thing}.",
    ]
    return question, steps, total - part


def ages(r: random.Random) -> Problem:
    a, b = r.sample(NAMES, 2)
    age, older, years = r.randint(5, 40), r.randint(2, 20), r.randint(2, 15)
    question = (
        f"{a} is {age} years old and {b} is {older} years older. "
        f"What will be the sum of their ages in {years} years?"
    )
    now = age + older
    steps = [
        f"Today {b} is {age} + {older} = {now} years old.",
        f"In {years} years {a} will be {age} + {years} = {age + years} years old.",
        f"By then {b} will be {now} + {years} = {now + years} years old.",
        f"The sum is {age + years} + {now + years} = {age + now + 2 * years}.",
    ]
    return question, steps, age + now + 2 * years


def legs(r: random.Random) -> Problem:
    name, n, m = r.choice(NAMES), r.randint(2, 30), r.randint(2, 30)
    four, two = (
        r.choice(("goats", "horses", "rabbits", "sheep", "cows")),
        r.choice(("hens", "ducks", "geese")),
    )
    question = f"{name} keeps {n} {four} and {m} {two}. How many legs do these animals have together?"
    steps = [
        f"The {four} have {n} * 4 = {4 * n} legs.",
        f"The {two} have {m} * 2 = {2 * m} legs.",
        f"Together they have {4 * n} + {2 * m} = {4 * n + 2 * m} legs.",
    ]
    return question, steps, 4 * n + 2 * m


def boxes(r: random.Random) -> Problem:
    thing, size, full, rest = (
        r.choice(THINGS),
        r.choice((6, 8, 10, 12, 24)),
        r.randint(3, 40),
        r.randint(1, 5),
    )
    total = size * full + rest
    question = (
        f"A worker fills {full} boxes with {size} {thing} each from a pile of {total}. "
        f"How many {thing} are left?"
    )
    steps = [
        f"The boxes hold {full} * {size} = {size * full} {thing}.",
        f"On the pile {total} - {size * full} = {rest} {thing} are left.",
    ]
    return question, steps, rest


def saving(r: random.Random) -> Problem:
    name, goal_thing = r.choice(NAMES), r.choice(("bicycle", "guitar", "telescope", "tent", "camera"))
    weekly, weeks, gift = r.randint(4, 25), r.randint(3, 20), r.randint(5, 60)
    price = weekly * weeks + gift
    question = (
        f"A {goal_thing} costs ${price}. {name} already has ${gift} and saves ${weekly} every week. "
        f"After how many weeks can {name} buy it?"
    )
    steps = [
        f"{name} still needs {price} - {gift} = {weekly * weeks} dollars.",
        f"That takes {weekly * weeks} / {weekly} = {weeks} weeks.",
    ]
    return question, steps, weeks


def average(r: random.Random) -> Problem:
    name, mean = r.choice(NAMES), r.randint(20, 90)
    a, b = r.randint(1, 15), r.randint(1, 15)
    scores = [mean - a, mean + a + b, mean - b]
    total = sum(scores)
    question = (
        f"{name} scores {scores[0]}, {scores[1]} and {scores[2]} points in three tests. "
        "What is the average score?"
    )
    steps = [
        f"The sum is {scores[0]} + {scores[1]} + {scores[2]} = {total} points.",
        f"The average of three tests is {total} / 3 = {mean} points.",
    ]
    return question, steps, mean


KINDS: tuple[Callable[[random.Random], Problem], ...] = (
    shopping,
    change,
    sharing,
    twice_as_many,
    half_left,
    travel,
    wages,
    rectangle,
    percentage,
    ages,
    legs,
    boxes,
    saving,
    average,
)


def generate(split: str) -> Iterator[dict[str, str]]:
    """Rows of `train_1M` or `test`, always the same ones; no problem occurs twice, nor in both splits."""
    seen = {row["problem"] for row in generate("test")} if split != "test" else set()
    r = random.Random(split)  # text seeds are hashed with SHA-512: the same on every platform
    for _ in range(SIZES[split]):
        question = None
        while question is None or question in seen:
            question, steps, answer = r.choice(KINDS)(r)
        seen.add(question)
        yield {
            "problem": question,
            "generated_solution": "\n".join([*steps, f"The answer is $\\boxed{{{answer}}}$."]),
            "expected_answer": str(answer),
            "problem_source": "demo",
        }
