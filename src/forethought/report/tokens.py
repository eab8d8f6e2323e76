"""Token ids -> the text of each token, for people.

Stored trees hold ids only. A tokenizer's `decode` of one id loses what depends on its neighbours: the space that
SentencePiece-like tokenizers put before a word, and characters whose bytes are spread over several tokens. So each
token is decoded behind its predecessor, and the pieces of a split character are shown on the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids -> as many texts; joined they are the text of the sequence."""

_BROKEN = "\ufffd"


def from_decode(decode: Callable[[list[int]], str]) -> Pieces:
    """Pieces of any `decode` of id lists."""
    pairs: dict[tuple[int, int], str] = {}

    def piece(before: int, now: int) -> str:
        """Text that `now` adds behind `before`; -1: nothing stands before."""
        if before < 0:
            return decode([now])
        head, both = decode([before]), decode([before, now])
        return both[len(head) :] if both.startswith(head) else decode([now])

    def pieces(ids: Sequence[int]) -> list[str]:
        ids = [int(i) for i in ids]
        out = []
        for key in zip([-1, *ids], ids, strict=False):
            if key not in pairs:
                pairs[key] = piece(*key)
            out.append(pairs[key])
        return _mend(out, ids, decode)

    return pieces


def _mend(out: list[str], ids: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Put a character whose bytes are spread over several tokens on the last of them."""
    at = 0
    while at < len(out):
        if _BROKEN not in out[at]:
            at += 1
            continue
        # The shortest run from here that decodes whole; a character has at most four bytes, so at most four tokens.
        for end in range(at + 2, min(at + 4, len(out)) + 1):
            whole = decode(ids[at:end])
            if _BROKEN not in whole:
                out[at:end] = [""] * (end - at - 1) + [whole]
                at = end
                break
        else:
            rest = out[at + 1 :]
            if len(rest) < 3 and all(not p or _BROKEN in p for p in rest):  # cut in the middle of the last character
                out[at:] = [decode(ids[at:]), *[""] * len(rest)]
                break
            at += 1
    return out


def from_token(decode_token: Callable[[int], str]) -> Pieces:
    """Pieces of a function of one id."""
    return lambda ids: [decode_token(int(i)) for i in ids]


def ids_only(ids: Sequence[int]) -> list[str]:
    """The ids themselves, where no tokenizer is known."""
    return [f"{int(i)} " for i in ids]


def find_tokenizer(run: Path) -> Path | None:
    """The tokenizer.json of a run folder: its own, its model's, or its newest checkpoint's."""
    places = [run, run / "model", run / "checkpoints" / "final", *sorted(run.glob("checkpoints/step_*"), reverse=True)]
    return next((p / "tokenizer.json" for p in places if (p / "tokenizer.json").is_file()), None)


def load_pieces(path: Path) -> Pieces:
    """Pieces of a tokenizer.json.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as err:  # the package raises plain Exception
        raise ValueError(str(err)) from None
    return from_decode(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
