"""Chat templates, token in, token out: messages become ids once; ids that a model saw or wrote are never made again.

A prompt is rendered and encoded once. What the model writes is kept as its ids. A next turn is encoded alone: the text
that the template puts behind an assistant turn and around the new messages is found by rendering with a placeholder
for the answer. Where a template rewrites what stands before (it drops earlier reasoning, moves the system text, ...),
the path so far is no prefix of the new prompt; then the turn starts a new branch, with fresh ids from the last point
that is still a prefix, and this is logged. Training paths are laid out exactly as sampled ones.

Without a chat template (`ChatRenderer.style` says which is in use):
- "chatml": the vocabulary has <|im_start|> and <|im_end|>, so turns are written in ChatML;
- "plain": contents one after another; an assistant's ends with the end token, any other with a newline if the
  vocabulary has one.
Text prompts (str) are raw text in every style, as in TRL's standard format; `as_messages` makes a user turn of one.

Beginning token: a template's text is taken as it stands (it writes its own), raw text and the two fallbacks get one if
the tokenizer adds one to plain text; there is never a second one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from forethought.errors import ConfigError, DataError, ModelError
from forethought.models.engine import Leaf
from forethought.tree.tree import Kind, TokenTree

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text or a list of parts, ...}."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ end }}{% else %}{{ separator }}{% endif %}{% endfor %}"
)
_ANSWER = "zqPLACEHOLDERqz"  # stands for an answer while a template is asked what it writes around one
_STAND_IN = [{"role": "user", "content": "a"}]  # history of a tree that began with raw text
_KINDS = {"system": Kind.SYSTEM, "user": Kind.USER, "assistant": Kind.ASSISTANT, "tool": Kind.TOOL}


def as_messages(prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
    """A prompt as messages: text becomes one user message.

    Raises:
        DataError: a message without role or content; names its index and field.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence):
        raise DataError(f"messages: expected text or a list of messages, got {type(prompt).__name__}")
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise DataError(f"messages[{i}]: expected an object with role and content, got {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise DataError(f"messages[{i}].role is {message.get('role')!r}: give system, user, assistant or tool")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str | list):
            raise DataError(f"messages[{i}].content is {content!r}: give text")
    return [dict(m) for m in prompt]


class ChatRenderer:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: any transformers tokenizer, with or without chat template, pad or beginning token.
        template: a Jinja chat template in place of the tokenizer's own.
        tools: tool schemas for templates that show them.
        options: further variables for the template, such as {"enable_thinking": False}.

    Attributes:
        style: "template", "chatml" or "plain".
        end_id: the token that ends an assistant turn (None if there is none); a target in training.
        end_ids: all tokens at which a sampler should stop.

    Raises:
        ModelError: the template cannot be rendered for a plain user and assistant exchange.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.options = dict(options or {})
        self.bos_id: int | None = self._added_bos()
        vocabulary = tokenizer.get_vocab()
        if template is not None or tokenizer.chat_template:
            self.style, self.template = "template", template
        elif "<|im_start|>" in vocabulary and "<|im_end|>" in vocabulary:
            self.style, self.template = "chatml", CHATML
        else:
            self.style, self.template = "plain", PLAIN
            self.options |= {"end": tokenizer.eos_token or "", "separator": self._newline()}
        self._find_end()
        eos = tokenizer.eos_token_id
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (self.end_id, eos) if i is not None))
        self._told = False

    # -- what tokenizer and template do --
    def _added_bos(self) -> int | None:
        """The beginning token, if the tokenizer puts it before plain text."""
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return None
        for token in range(len(self.tokenizer)):
            try:  # an alphabet may lack any given letter, so the text comes from the vocabulary
                text = self.tokenizer.decode([token], skip_special_tokens=True)
                bare = self.tokenizer.encode(text, add_special_tokens=False) if text.strip() else []
            except Exception:
                continue
            if bare and bare[0] != bos:
                return bos if self.tokenizer.encode(text)[:1] == [bos] else None
        return None

    def _newline(self) -> str:
        try:
            ids = self.tokenizer.encode("\n", add_special_tokens=False)
        except Exception:
            return ""
        return "\n" if ids and self.tokenizer.decode(ids) == "\n" else ""

    def _find_end(self) -> None:
        """Learn what ends an assistant turn: the first special token that the template writes behind the answer.

        A template that writes none ends in the tokenizer's end token, which then stands in the ids but not in the text.
        """
        try:
            text = self.render([*_STAND_IN, _assistant(_ANSWER)], add_generation_prompt=False)
        except DataError as err:
            raise ModelError(f"the chat template cannot render a user and an assistant message: {err}") from err
        if _ANSWER not in text:
            raise ModelError("the chat template drops the assistant's text; give another template")
        self._behind = text[text.index(_ANSWER) + len(_ANSWER) :]
        special = {str(t) for t in self.tokenizer.all_special_tokens}
        special |= {str(t) for t in getattr(self.tokenizer, "added_tokens_decoder", {}).values()}
        found = [(self._behind.index(s), -len(s), s) for s in special if s and s in self._behind]
        place, _, self.end_text = min(found, default=(0, 0, ""))
        self._lead = self._behind[:place]  # the template's text between answer and end token
        self.end_id: int | None = (
            self.tokenizer.convert_tokens_to_ids(self.end_text) if self.end_text else self.tokenizer.eos_token_id
        )

    # -- text and ids --
    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The template's text for a conversation.

        Raises:
            DataError: the template refuses it (roles that do not alternate, ...) or a message is malformed.
        """
        messages = as_messages(messages)
        if self.style != "template":
            messages = [_as_text(m, i) for i, m in enumerate(messages)]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.options,
            )
        except Exception as err:  # a template raises whatever it likes
            roles = ", ".join(m["role"] for m in messages) or "none"
            raise DataError(f"the chat template refuses a conversation with the roles {roles}: {err}") from err
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that continues something: no beginning or end token is added.

        Raises:
            DataError: the vocabulary cannot express it.
        """
        if not text:
            return []
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as err:
            raise DataError(f"the tokenizer cannot encode {text[:60]!r}: {err}") from err

    def _begin(self, ids: list[int], *, add: bool) -> list[int]:
        """Exactly one beginning token where one belongs."""
        bos = self.tokenizer.bos_token_id
        if bos is not None and self.bos_id is not None:
            while ids[:2] == [bos, bos]:
                ids = ids[1:]
        return [self.bos_id, *ids] if add and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def _opening(self, text: str) -> list[int]:
        """Ids of a rendered text that begins a path."""
        return self._begin(self.encode(text), add=self.style != "template")

    def prompt_ids(self, prompt: str | Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a prompt: raw text (str), or a conversation (messages) rendered by the template.

        Raises:
            DataError: nothing is left to predict from, the template refuses it, or the vocabulary cannot express it.
        """
        if isinstance(prompt, str):
            ids = self._begin(self.encode(prompt), add=True)
        else:
            ids = self._opening(self.render(prompt, add_generation_prompt=add_generation_prompt))
        if not ids:
            raise DataError("the prompt is empty: there is no token to predict from; give it some text")
        return ids

    def continuation(self, before: str, text: str) -> list[int]:
        """Ids of a text after another one, never merged with it: what precedes keeps its own ids.

        Encoded together where the border holds (so that no artificial space enters), else alone.
        """
        first, both = self.encode(before), self.encode(before + text)
        return both[len(first) :] if both[: len(first)] == first else self.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids for people and rewards, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    # -- trees --
    def start(
        self, prompt: str | Sequence[Message], *, task: str = "", seed: int = 0, meta: Mapping[str, Any] | None = None
    ) -> Leaf:
        """A tree that begins with a prompt, and the node to continue from.

        That node is the root, except for a template that rewrites its first turns when others follow: there the root
        is empty and the prompt hangs below it, so that later turns can branch off. The messages are kept in the node's
        meta.
        """
        kept = dict(meta or {})
        ids = self.prompt_ids(prompt)
        if isinstance(prompt, str):
            return TokenTree(ids, task=task, seed=seed, meta=kept), 0
        messages = as_messages(prompt)
        kept["messages"] = messages
        later = [*messages, _assistant(_ANSWER), {"role": "user", "content": "a"}]
        try:
            stays = self.render(later, add_generation_prompt=True).startswith(
                self.render(messages, add_generation_prompt=True)
            )
        except DataError:  # the template takes one turn only
            stays = True
        if stays:
            return TokenTree(ids, task=task, seed=seed, meta=kept), 0
        tree = TokenTree(task=task, seed=seed)
        return tree, tree.add(0, ids, kind=Kind.PROMPT, meta=kept)

    def display(self, tree: TokenTree, node: int) -> list[dict[str, Any]]:
        """The path to a node as messages, for people and for text-only judges; never turned back into its ids."""
        path = tree.path(node)
        begin = max((i for i, n in enumerate(path) if tree.meta[n].get("rerendered")), default=0)
        out: list[dict[str, Any]] = []
        written: list[int] = []
        for n in [*path[begin:], None]:
            own = n is not None and tree.kind[n] in (Kind.ASSISTANT, Kind.THOUGHT) and "messages" not in tree.meta[n]
            if n is not None and own:
                written += tree.node_ids(n)
                continue
            if written:
                out.append(_assistant(self.text(written)))
                written = []
            if n is None:
                break
            if "messages" in tree.meta[n]:
                out += [dict(m) for m in tree.meta[n]["messages"]]
            elif tree.length[n]:
                role = {Kind.SYSTEM: "system", Kind.TOOL: "tool"}.get(Kind(int(tree.kind[n])), "user")
                out.append({"role": role, "content": self.text(tree.node_ids(n))})
        return out

    def extend_turn(
        self, tree: TokenTree, node: int, messages: str | Sequence[Message], *, kind: Kind | None = None
    ) -> int:
        """Append the next user, tool or observation turn, ready for the assistant to answer; returns the new node.

        The path to `node` ends in an assistant turn, complete or cut short (then the end of turn that the template
        writes is added as context), and the new node is its child. If the template rewrites the history, the new node
        hangs below the last one whose path is still a prefix of the new prompt, its ids are rendered afresh, its meta
        has "rerendered": true, and this is logged once.

        Args:
            messages: text is one user message.
            kind: of the new node; by default from the first new message's role.

        Raises:
            DataError: no messages, no assistant turn before, or the template refuses the conversation.
            ModelError: no branch of this tree can hold the turn (its root is not a prefix of the new prompt).
        """
        new = as_messages(messages)
        if not new:
            raise DataError("extend_turn: no messages; give the next turn")
        kind = _KINDS.get(new[0]["role"], Kind.USER) if kind is None else kind
        history = self.display(tree, node)
        if not history or history[-1]["role"] != "assistant":
            raise DataError(f"extend_turn: node {node} does not end in an assistant turn; pass all messages at once")
        last = history.pop()["content"]
        raw = bool(tree.length[0]) and "messages" not in tree.meta[0]
        suffix = self._suffix(_STAND_IN if raw else history, last, new)
        if suffix is None:
            return self._branch(tree, node, [*history, _assistant(last), *new], kind, raw)
        ids = tree.path_ids(node)
        if not ids or ids[-1] not in self.end_ids:  # cut short: the template's end of turn is context
            skip = len(self._lead) if last.endswith(self._lead) and suffix.startswith(self._lead) else 0
            added = self.encode(suffix[skip:])
        else:
            added = self._after_end(suffix)
        return tree.add(node, added, kind=kind, meta={"messages": new})

    def _suffix(self, history: list[dict[str, Any]], last: str, new: list[dict[str, Any]]) -> str | None:
        """What the template writes from the end of the last answer on; None if it rewrites what stands before that."""
        before = self.render(history, add_generation_prompt=True)
        asked = self.render([*history, _assistant(_ANSWER), *new], add_generation_prompt=True)
        if not asked.startswith(before) or not asked[len(before) :].lstrip().startswith(_ANSWER):
            return None
        suffix = asked[asked.index(_ANSWER, len(before)) + len(_ANSWER) :]
        real = self.render([*history, _assistant(last), *new], add_generation_prompt=True)
        if not real.startswith(before) or not real[len(before) :].endswith(suffix):
            return None
        # A template may trim an answer; what the model wrote stays as it is.
        return suffix if real[len(before) : len(real) - len(suffix)].strip() == last.strip() else None

    def _after_end(self, behind: str) -> list[int]:
        """Ids of the text behind an answer, without the end token that the path has already."""
        lead, found, rest = behind.partition(self.end_text) if self.end_text else ("", "", behind)
        return self.continuation(self.end_text, rest) if found and lead in ("", self._lead) else self.encode(behind)

    def _branch(self, tree: TokenTree, node: int, whole: list[dict[str, Any]], kind: Kind, raw: bool) -> int:
        full = self.render(whole, add_generation_prompt=True)
        for at in [] if raw else reversed(tree.path(node)):
            if "messages" not in tree.meta[at]:
                continue
            before = self.render(self.display(tree, at), add_generation_prompt=True)
            if full.startswith(before):
                ids = self.continuation(before, full[len(before) :])
                break
        else:
            if tree.length[0]:
                raise ModelError(
                    "the chat template rewrites the prompt in the tree's root when a turn is added, so no branch can "
                    "hold the turn; begin the tree with renderer.start(messages)"
                )
            at, ids = 0, self._opening(full)
        if not self._told:
            log.warning("the chat template rewrites earlier turns: each such turn starts a new branch of its tree")
            self._told = True
        return tree.add(at, ids, kind=kind, meta={"messages": whole, "rerendered": True})

    # -- training paths --
    def grow(self, tree: TokenTree, messages: Sequence[Message], *, first: int = 0) -> list[int]:
        """Add a conversation to a tree with an empty root, laid out as if it had been sampled; returns target nodes.

        Each assistant message from index `first` on is a node of its own: its text as the template writes it and its
        end token, all with weight 1. Everything else is context. Where the template rewrites the history, a turn hangs
        on a branch that holds exactly the prompt that the model would see.

        Raises:
            DataError: malformed messages, or the template refuses the conversation.
        """
        messages = as_messages(messages)
        prompts: list[tuple[str, int]] = []  # text of each prompt so far and the node that ends it
        targets: list[int] = []
        path = ""  # text up to the end of the last answer, without its end token
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < first:
                continue
            prompt = self.render(messages[:i], add_generation_prompt=True)
            if targets and prompt.startswith(path):
                node = tree.add(targets[-1], self._after_end(prompt[len(path) :]), kind=self._kind_at(messages, i))
            else:
                held = [(text, n) for text, n in prompts if prompt.startswith(text)]
                text, parent = max(held, key=lambda pair: len(pair[0])) if held else ("", 0)
                ids = self.continuation(text, prompt[len(text) :]) if text else self._opening(prompt)
                node = tree.add(parent, ids, kind=self._kind_at(messages, i) if text else Kind.PROMPT)
            answer = self._answer(messages, i, prompt)
            ids = self.continuation(prompt, answer) + ([] if self.end_id is None else [self.end_id])
            prompts.append((prompt, node))
            path = prompt + answer
            targets.append(tree.add(node, ids))
            tree.weight[tree.span(targets[-1])] = 1
        return targets

    @staticmethod
    def _kind_at(messages: list[dict[str, Any]], i: int) -> Kind:
        return _KINDS.get(messages[i - 1]["role"], Kind.USER) if i else Kind.USER

    def _answer(self, messages: list[dict[str, Any]], i: int, prompt: str) -> str:
        """What the model has to write in turn i, up to its end token."""
        whole = self.render(messages[: i + 1], add_generation_prompt=False)
        if whole.startswith(prompt) and whole.endswith(self._behind):
            return whole[len(prompt) : len(whole) - len(self._behind)] + self._lead
        if isinstance(messages[i].get("content"), str):
            return messages[i]["content"] + self._lead
        raise DataError(f"messages[{i}]: the chat template does not show what the assistant wrote here")


def _as_text(message: dict[str, Any], i: int) -> dict[str, Any]:
    """A message for the two fallback templates, which know text only."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise DataError(f"messages[{i}]: the tokenizer has no chat template, so only text can be rendered")
    return {"role": message["role"], "content": content}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# -- records (TRL's columns) -----------------------------------------------------------------------------------------


def sft_tree(
    renderer: ChatRenderer,
    record: Mapping[str, Any],
    *,
    max_length: int | None = None,
    keep: Literal["start", "end"] = "start",
    task: str = "",
) -> TokenTree:
    """A training record as a tree; targets have weight 1.

    Columns: `messages` (targets: all assistant turns), `prompt` and `completion` (targets: the completion; both text,
    or both messages), or `text` (targets: all tokens but the first). Answers end with the end token, also a target,
    unless `max_length` cuts it off.

    Args:
        max_length: longest path in tokens; each path is cut by itself, so a record does not depend on its batch.
        keep: which end of a longer path stays.

    Raises:
        DataError: other columns or types, or what rendering raises; names the column.
    """
    tree = TokenTree(task=task)
    if "messages" in record:
        renderer.grow(tree, _listed(record, "messages"))
    elif "prompt" in record and "completion" in record:
        _complete(renderer, tree, record, "completion")
    elif "text" in record:
        ids = renderer.prompt_ids(_texted(record, "text"))
        end = renderer.tokenizer.eos_token_id
        ids += [end] if end is not None and ids[-1] != end else []
        node = tree.add(tree.add(0, ids[:1], kind=Kind.PROMPT), ids[1:], kind=Kind.PROMPT)
        tree.weight[tree.span(node)] = 1
    else:
        names = ", ".join(map(repr, record)) or "none"
        raise DataError(f"a training record needs messages, prompt and completion, or text; its columns are: {names}")
    return _laid_out(tree, max_length, keep)


def sft_trees(
    renderer: ChatRenderer,
    records: Sequence[Mapping[str, Any]],
    *,
    max_length: int | None = None,
    keep: Literal["start", "end"] = "start",
) -> list[TokenTree]:
    """`sft_tree` of every record; problems name the record.

    Raises:
        DataError: a record cannot be used, or no record has any target.
    """
    trees = []
    for i, record in enumerate(records):
        try:
            trees.append(sft_tree(renderer, record, max_length=max_length, keep=keep, task=str(record.get("id", i))))
        except DataError as err:
            raise DataError(f"record {i}: {err}") from err
    if not any(tree.weight.any() for tree in trees):
        raise DataError(
            f"no target in any of {len(trees)} records: none has an assistant turn"
            + (f" within max_length={max_length}" if max_length else "")
        )
    return trees


def preference_tree(
    renderer: ChatRenderer,
    record: Mapping[str, Any],
    *,
    max_length: int | None = None,
    keep: Literal["start", "end"] = "start",
    task: str = "",
) -> TokenTree:
    """A preference record as a tree: the shared prompt once, two leaves with meta "label" "chosen" and "rejected".

    Columns: `prompt`, `chosen`, `rejected` (all text, or all messages); without `prompt` the messages that both begin
    with are the prompt.

    Raises:
        DataError: as `sft_tree`.
    """
    tree = TokenTree(task=task)
    record = dict(record)
    if "chosen" not in record or "rejected" not in record:
        names = ", ".join(map(repr, record)) or "none"
        raise DataError(f"a preference record needs chosen and rejected; its columns are: {names}")
    if "prompt" not in record:
        good, bad = _listed(record, "chosen"), _listed(record, "rejected")
        shared = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
        record |= {"prompt": good[:shared], "chosen": good[shared:], "rejected": bad[shared:]}
    for name in ("chosen", "rejected"):
        nodes = _complete(renderer, tree, record, name)
        if not nodes:
            raise DataError(f"column {name!r}: it has no assistant turn of its own")
        tree.meta[nodes[-1]]["label"] = name
    return _laid_out(tree, max_length, keep)


def _texted(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record[name], str):
        raise DataError(f"column {name!r}: expected text, got {type(record[name]).__name__}")
    return record[name]


def _listed(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if isinstance(record[name], str) or not record[name]:
        raise DataError(f"column {name!r}: expected a list of messages, got {record[name]!r:.40}")
    try:
        return as_messages(record[name])
    except DataError as err:
        raise DataError(f"column {name!r}: {err}") from None


def _complete(renderer: ChatRenderer, tree: TokenTree, record: Mapping[str, Any], name: str) -> list[int]:
    """Add prompt + completion below the root; returns the target nodes."""
    prompt, completion = record["prompt"], record[name]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise DataError(f"columns 'prompt' and {name!r}: give both as text, or both as lists of messages")
    if not isinstance(prompt, str):
        before = _listed(record, "prompt")
        return renderer.grow(tree, [*before, *_listed(record, name)], first=len(before))
    end = renderer.tokenizer.eos_token_id
    node = tree.add(0, renderer.prompt_ids(prompt), kind=Kind.PROMPT)
    target = tree.add(node, renderer.continuation(prompt, completion) + ([] if end is None else [end]))
    tree.weight[tree.span(target)] = 1
    return [target]


def _laid_out(tree: TokenTree, max_length: int | None, keep: str) -> TokenTree:
    """The tree with each path cut to `max_length`, equal beginnings shared, and the root filled if all begin alike.

    A token is a target on the first path that holds it, and never at the very beginning of a path, where nothing
    predicts it.
    """
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length={max_length}: give at least 1, or None")
    if keep not in ("start", "end"):
        raise ConfigError(f"keep={keep!r}: 'start' or 'end'")
    paths: list[list[tuple[int, int, int]]] = []  # (node, from, to)
    for leaf in tree.leaves():
        total = tree.path_length(leaf)
        room = total if max_length is None else min(total, max_length)
        low = total - room if keep == "end" else 0
        at, spans = 0, []
        for node in tree.path(leaf):
            size = int(tree.length[node])
            a, b = max(low - at, 0), min(low + room - at, size)
            at += size
            if a < b:
                spans.append((node, a, b))
        paths.append(spans)

    def content(node: int, a: int, b: int) -> tuple:
        return int(tree.kind[node]), tuple(tree.node_ids(node)[a:b]), tree.meta[node].get("label")

    out = TokenTree(task=tree.task, seed=tree.seed)
    if paths[0] and len({content(*spans[0]) for spans in paths}) == 1:
        node, a, b = paths[0][0]
        out = TokenTree(tree.node_ids(node)[a:b], kind=Kind(int(tree.kind[node])), task=tree.task, seed=tree.seed)
        out.weight[1:] = tree.weight[tree.span(node)][a:b][1:]
    made: dict[tuple, int] = {}
    used = {spans[0][0] for spans in paths} if out.n_tokens else set()
    for spans in paths:
        parent = 0
        for node, a, b in spans[1:] if out.length[0] else spans:
            key = (parent, content(node, a, b))
            if key not in made:
                ids, kind = tree.node_ids(node)[a:b], Kind(int(tree.kind[node]))
                made[key] = out.add(parent, ids, kind=kind, meta=tree.meta[node])
                if node not in used:
                    first = int(out.path_length(parent) == 0)
                    out.weight[out.span(made[key])][first:] = tree.weight[tree.span(node)][a:b][first:]
            parent = made[key]
        used |= {node for node, _, _ in spans}
    return out
