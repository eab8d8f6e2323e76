"""Templates of one-step and two-step story problems in plain English, written for this project.

{A} and {B} are names, {things} is a plural noun, {x}, {y}, {z} are numbers of at least 2. Stories avoid pronouns, so a
name may stand for anyone.
"""

from __future__ import annotations

NAMES = (
    "Ada Amir Bela Carla Chen Dora Emil Fatima Goran Hana Ivo Jamila Kofi Lena Marco Nadia Omar Petra Quinn Rosa Sven "
    "Tara Uma Viktor Wanda Yusuf Zoe Oskar"
).split()
THINGS = (
    "apples books pencils marbles stickers coins shells stamps buttons cookies cards balloons pears candles ribbons "
    "bottles flowers plums tickets beads photos walnuts crayons lemons"
).split()

ONE_STEP: dict[str, tuple[str, ...]] = {
    "add": (
        "{A} has {x} {things}. {B} gives {A} {y} more. How many {things} does {A} have now?",
        "{A} found {x} {things} in the morning and {y} {things} in the evening. How many {things} did {A} find in all?",
        "A box holds {x} {things}. {A} puts {y} more into it. How many {things} are in the box?",
        "{A} has {x} {things} and {B} has {y}. How many {things} do they have together?",
        "There are {x} {things} on a table and {y} {things} on a shelf. How many {things} are there altogether?",
        "{A} used {x} {things} and still has {y}. How many {things} did {A} have at the start?",
        "{B} has {y} more {things} than {A}. {A} has {x} {things}. How many {things} does {B} have?",
        "{A} sold {x} {things} on Monday and {y} on Tuesday. How many {things} did {A} sell on the two days?",
        "After {A} lost {y} {things}, {x} were left. How many {things} did {A} own before?",
        "A shop got {x} {things} last week and {y} this week. How many {things} did the shop get?",
        "{A} walked {x} minutes to the market and {y} minutes back. How many minutes did {A} walk?",
    ),
    "sub": (
        "{A} has {x} {things} and gives {y} of them to {B}. How many {things} does {A} have left?",
        "There were {x} {things} in a basket. {A} took {y} of them out. How many {things} are still in the basket?",
        "{A} needs {x} {things} and has {y}. How many more {things} does {A} need?",
        "{A} has {x} {things}. {B} has {y}. How many more {things} does {A} have than {B}?",
        "Of {x} {things}, {y} are red and the others are blue. How many {things} are blue?",
        "{A} and {B} have {x} {things} together. {B} has {y} of them. How many {things} does {A} have?",
        "{A} bought {x} {things} and used {y} of them. How many {things} remain?",
        "A shelf had {x} {things}. Now it has {y}. How many {things} were taken away?",
        "{A} has {y} fewer {things} than {B}. {B} has {x}. How many {things} does {A} have?",
        "A rope is {x} meters long. {A} cuts off {y} meters. How many meters are left?",
        "{A} started with some {things}, found {y} more and now has {x}. How many {things} did {A} start with?",
    ),
    "mul": (
        "{A} has {x} boxes with {y} {things} in each. How many {things} does {A} have?",
        "Each of {x} children brings {y} {things}. How many {things} do they bring?",
        "There are {x} rows of {y} chairs. How many chairs are there?",
        "{A} reads {y} pages a day for {x} days. How many pages does {A} read?",
        "One ticket costs {y} dollars. How many dollars do {x} tickets cost?",
        "{A} packs {x} bags and puts {y} {things} into each. How many {things} does {A} pack?",
        "A garden has {x} beds, and {y} roses grow in each bed. How many roses grow in the garden?",
        "{B} has {x} times as many {things} as {A}. {A} has {y} {things}. How many {things} does {B} have?",
    ),
    "div": (
        "{A} shares {x} {things} equally among {y} friends. How many {things} does each friend get?",
        "{A} puts {x} {things} into bags of {y}. How many bags does {A} fill?",
        "{x} {things} lie in {y} equal rows. How many {things} are in each row?",
        "{A} pays {x} dollars for {y} equal tickets. How many dollars does one ticket cost?",
        "{A} has {x} {things} and uses {y} each day. For how many days do they last?",
        "A ribbon of {x} meters is cut into {y} equal pieces. How many meters long is each piece?",
        "{y} people carry {x} {things} in equal shares. How many {things} does each person carry?",
        "{B} has {x} {things}, {y} times as many as {A}. How many {things} does {A} have?",
    ),
}
"""add: x + y. sub: x - y. mul: x * y. div: x / y."""

TWO_STEP: dict[str, tuple[str, ...]] = {
    "add sub": (
        "{A} has {x} {things}, finds {y} more and gives {z} to {B}. How many {things} does {A} have now?",
        "A bus has {x} passengers. At a stop {y} get on and {z} get off. How many passengers are on the bus?",
        "{A} picked {x} {things} and {B} picked {y}. They ate {z} of them. How many {things} are left?",
        "A shop had {x} {things}, got {y} more and sold {z}. How many {things} does the shop have?",
        "{A} had {x} dollars, earned {y} dollars and spent {z} dollars. How many dollars does {A} have?",
    ),
    "sub sub": (
        "{A} had {x} {things}. {A} gave {y} to {B} and lost {z}. How many {things} does {A} have left?",
        "Of {x} {things}, {y} are red, {z} are green and the others are blue. How many {things} are blue?",
        "{A} has {x} dollars and buys a book for {y} dollars and a pen for {z} dollars. How many dollars are left?",
    ),
    "sub add": (
        "{A} has {x} {things}, uses {y} and then buys {z} more. How many {things} does {A} have?",
        "There were {x} birds in a tree. {y} flew away and {z} came. How many birds are in the tree?",
        "A tank holds {x} liters. {y} liters run out and {z} liters are filled in. How many liters does it hold now?",
    ),
    "mul add": (
        "{A} has {x} boxes with {y} {things} in each, and {z} more {things}. How many {things} does {A} have?",
        "{A} buys {x} tickets for {y} dollars each and a map for {z} dollars. How many dollars does {A} pay?",
        "{A} reads {y} pages a day for {x} days, then {z} pages more. How many pages does {A} read?",
    ),
    "mul sub": (
        "{A} has {x} bags with {y} {things} in each and gives {z} {things} away. How many {things} are left?",
        "There are {x} rows of {y} seats, and {z} seats are taken. How many seats are free?",
        "{A} bakes {x} trays of {y} cookies, and {B} eats {z}. How many cookies are left?",
    ),
}
"""First operation on x and y, second on the result and z."""
