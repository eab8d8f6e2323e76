"""What there is in a household: kinds of receptacles and objects, what may lie where, and where things usually lie.

The placement weights are the world's learnable knowledge: fixed, the same in every room, and never told to the policy.
They and the room kinds are this library's own; names, openable receptacles and what can be heated, cooled, cleaned,
sliced and switched on follow ALFWorld (arXiv 2010.03768).
"""

from __future__ import annotations

from dataclasses import dataclass

OPENABLE = frozenset("cabinet drawer fridge microwave safe".split())
HEATABLE = frozenset("apple bread cup egg mug plate potato tomato".split())
COOLABLE = frozenset("apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle".split())
CLEANABLE = frozenset(
    "apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate pot potato soapbar "
    "spatula spoon tomato".split()
)
SLICEABLE = frozenset("apple bread egg lettuce potato tomato".split())
KNIVES = frozenset(("butterknife", "knife"))
LAMPS = frozenset(("desklamp", "floorlamp"))
"""Can be used; cannot be picked up."""

_CLASSES = {
    "food": "apple bread egg lettuce potato tomato",
    "dish": "bowl cup mug plate",
    "cutlery": "butterknife fork knife ladle spatula spoon",
    "cookware": "kettle pan pot",
    "bottle": "peppershaker saltshaker soapbottle spraybottle vase winebottle",
    "wash": "cloth dishsponge soapbar toiletpaper",
    "towel": "handtowel towel",
    "paper": "book newspaper pen pencil",
    "small": "candle cd cellphone creditcard keychain remotecontrol watch",
    "large": "alarmclock laptop statue",
    "soft": "pillow",
    "lamp": "desklamp floorlamp",
}
CLASS_OF = {kind: name for name, kinds in _CLASSES.items() for kind in kinds.split()}
OBJECTS = tuple(sorted(CLASS_OF))

_SURFACE = "food dish cutlery cookware bottle wash towel paper small large lamp"
_HOLDS = {
    **dict.fromkeys("countertop diningtable coffeetable sidetable desk dresser shelf tvstand".split(), _SURFACE),
    "cabinet": "dish cookware bottle wash small",
    "drawer": "cutlery wash towel paper small",
    "fridge": "food dish cookware bottle",
    "microwave": "food dish",
    "sinkbasin": "food dish cutlery cookware wash towel",
    "bathtubbasin": "wash towel",
    "stoveburner": "cookware",
    "garbagecan": "food bottle wash paper",
    "bed": "paper small large soft",
    "sofa": "paper small large soft",
    "armchair": "paper small large soft",
    "safe": "small",
    "toilet": "wash bottle paper small",
    "towelholder": "towel",
    "handtowelholder": "towel",
    "laundryhamper": "towel",
}
_HOLDS_ALSO = {"coffeemachine": "mug", "toaster": "bread", "toiletpaperhanger": "toiletpaper"}
RECEPTACLES = tuple(sorted({*_HOLDS, *_HOLDS_ALSO}))


def can_hold(receptacle: str, kind: str) -> bool:
    """Whether an object of this kind may be put in or on a receptacle of this kind."""
    if receptacle in _HOLDS_ALSO:
        return kind == _HOLDS_ALSO[receptacle]
    return CLASS_OF[kind] in _HOLDS[receptacle].split()


@dataclass(frozen=True)
class RoomKind:
    """A kind of room.

    Attributes:
        receptacles: kind -> (fewest, most).
        objects: kind -> (fewest, most).
        places: object kind -> receptacle kind -> weight.
    """

    receptacles: dict[str, tuple[int, int]]
    objects: dict[str, tuple[int, int]]
    places: dict[str, dict[str, float]]


def _room(receptacles: str, objects: str) -> RoomKind:
    """`cabinet 2-6`; `mug 1-3: cabinet 4, countertop 3`."""
    counts = {}
    for part in receptacles.split(","):
        kind, count = part.split()
        low, _, high = count.partition("-")
        counts[kind] = (int(low), int(high or low))
    many, places = {}, {}
    for line in objects.strip().splitlines():
        head, _, tail = line.partition(":")
        kind, count = head.split()
        low, _, high = count.partition("-")
        many[kind] = (int(low), int(high or low))
        places[kind] = {where: float(weight) for where, weight in (part.split() for part in tail.split(","))}
        assert all(where in counts and can_hold(where, kind) for where in places[kind]), (kind, places[kind])
    return RoomKind(counts, many, places)


ROOMS: dict[str, RoomKind] = {
    # Small enough for models of a million parameters, with all goal families.
    "mini": _room(
        "cabinet 1-3, countertop 1-2, drawer 1-3, fridge 1, microwave 1, shelf 0-2, sidetable 1, sinkbasin 1",
        """
        apple 0-2: fridge 7, countertop 2, sinkbasin 1
        book 0-2: shelf 6, sidetable 4
        bowl 0-2: cabinet 7, shelf 2, countertop 1
        bread 0-2: countertop 8, fridge 2
        desklamp 1: sidetable 1
        egg 0-2: fridge 9, microwave 1
        fork 0-2: drawer 8, sinkbasin 2
        knife 0-2: countertop 7, drawer 3
        mug 0-2: cabinet 5, shelf 3, sinkbasin 2
        plate 0-2: cabinet 8, sinkbasin 2
        saltshaker 0-2: shelf 6, cabinet 3, countertop 1
        tomato 0-2: fridge 5, countertop 5
        """,
    ),
    "kitchen": _room(
        "cabinet 3-8, coffeemachine 1, countertop 1-3, diningtable 0-1, drawer 2-6, fridge 1, garbagecan 1, microwave 1, "
        "shelf 0-3, sinkbasin 1, stoveburner 2-4, toaster 1",
        """
        apple 0-3: fridge 6, countertop 3, diningtable 3, sinkbasin 1, garbagecan 1
        bowl 0-2: cabinet 6, shelf 3, countertop 1, diningtable 1
        bread 0-2: countertop 7, diningtable 2, fridge 1
        butterknife 0-2: drawer 5, countertop 3, diningtable 1
        cup 0-2: cabinet 5, shelf 2, countertop 2, sinkbasin 1
        dishsponge 0-2: sinkbasin 5, countertop 2, drawer 2, cabinet 1
        egg 0-3: fridge 8, countertop 1, garbagecan 1
        fork 0-2: drawer 6, sinkbasin 2, diningtable 2
        kettle 0-2: stoveburner 5, countertop 2, cabinet 2
        knife 0-2: countertop 6, drawer 3, diningtable 1
        ladle 0-2: drawer 5, countertop 3, diningtable 1
        lettuce 0-2: fridge 7, countertop 2, diningtable 1
        mug 0-3: cabinet 4, coffeemachine 3, shelf 2, countertop 2
        pan 0-2: stoveburner 7, countertop 2, cabinet 1
        peppershaker 0-3: cabinet 4, shelf 3, diningtable 2, countertop 1
        plate 0-2: cabinet 6, shelf 2, diningtable 2, sinkbasin 1
        pot 0-2: stoveburner 6, cabinet 2, sinkbasin 1
        potato 0-3: fridge 4, countertop 3, sinkbasin 2, garbagecan 1
        saltshaker 0-3: shelf 4, cabinet 3, diningtable 2, countertop 1
        soapbottle 0-2: countertop 5, cabinet 3, garbagecan 1
        spatula 0-2: drawer 5, countertop 3, sinkbasin 1
        spoon 0-3: drawer 6, sinkbasin 2, diningtable 2
        tomato 0-3: fridge 4, countertop 4, diningtable 2, sinkbasin 1
        winebottle 0-2: fridge 4, cabinet 3, countertop 2, diningtable 1
        """,
    ),
    "livingroom": _room(
        "armchair 1-2, cabinet 0-2, coffeetable 1, diningtable 0-1, drawer 0-4, garbagecan 1, shelf 0-3, sidetable 1-3, "
        "sofa 1, tvstand 1",
        """
        book 0-3: coffeetable 4, shelf 4, sofa 1, sidetable 2
        candle 0-2: coffeetable 3, shelf 3, diningtable 3, cabinet 1
        cellphone 0-2: coffeetable 3, sofa 3, sidetable 3, armchair 1
        creditcard 0-3: coffeetable 3, sidetable 3, armchair 2, drawer 2
        desklamp 0-1: sidetable 1
        floorlamp 1: sidetable 1
        keychain 0-3: coffeetable 3, sofa 2, drawer 3, sidetable 2
        laptop 0-2: coffeetable 4, sofa 3, diningtable 3, armchair 1
        newspaper 0-2: coffeetable 5, sofa 3, drawer 1, garbagecan 1
        pen 0-2: sidetable 4, coffeetable 2, drawer 3
        pillow 0-3: sofa 6, armchair 4
        remotecontrol 0-3: sofa 3, tvstand 4, armchair 2, coffeetable 3
        statue 0-3: shelf 4, tvstand 3, coffeetable 2, sidetable 2
        vase 0-3: coffeetable 3, shelf 4, cabinet 2, tvstand 1
        watch 0-3: coffeetable 2, drawer 4, sidetable 3, shelf 2
        """,
    ),
    "bedroom": _room(
        "armchair 0-1, bed 1, desk 1-2, drawer 2-6, dresser 0-1, garbagecan 1, laundryhamper 0-1, safe 0-1, shelf 1-4, "
        "sidetable 1-2",
        """
        alarmclock 0-3: desk 5, sidetable 4, shelf 2, dresser 2
        book 0-3: bed 3, desk 4, shelf 3
        bowl 0-2: desk 5, shelf 4, sidetable 1
        cd 0-3: drawer 4, desk 3, shelf 2, safe 2
        cellphone 0-3: bed 3, desk 3, sidetable 3, drawer 2
        creditcard 0-3: drawer 4, desk 2, safe 2, sidetable 2
        desklamp 1: desk 6, sidetable 4
        keychain 0-3: drawer 4, safe 3, sidetable 2, dresser 2
        laptop 0-2: bed 5, desk 5
        mug 0-2: desk 5, shelf 3, sidetable 2
        pen 0-3: desk 4, drawer 3, shelf 2, sidetable 2
        pencil 0-3: desk 4, drawer 3, shelf 2, sidetable 2
        pillow 0-2: bed 9, armchair 1
        watch 0-2: drawer 3, dresser 3, safe 2, sidetable 2
        """,
    ),
    "bathroom": _room(
        "bathtubbasin 0-1, cabinet 2-4, countertop 1, drawer 0-4, garbagecan 1, handtowelholder 1-2, shelf 0-2, sinkbasin 1-2, "
        "toilet 1, toiletpaperhanger 1, towelholder 1",
        """
        candle 0-2: countertop 4, toilet 3, cabinet 2, shelf 2
        cloth 0-3: cabinet 4, drawer 3, bathtubbasin 2, countertop 2, sinkbasin 1
        dishsponge 0-2: sinkbasin 3, bathtubbasin 3, cabinet 3
        handtowel 1-2: handtowelholder 9, countertop 1
        soapbar 0-3: sinkbasin 4, countertop 2, bathtubbasin 3, toilet 1
        soapbottle 0-3: countertop 4, cabinet 3, toilet 2, garbagecan 1
        spraybottle 0-3: cabinet 4, toilet 3, countertop 2, garbagecan 2
        toiletpaper 1-3: toiletpaperhanger 3, toilet 3, cabinet 3, drawer 1
        towel 0-2: towelholder 8, bathtubbasin 2
        """,
    ),
}
