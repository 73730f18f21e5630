"""Read the commands of a shell script without running anything.

Assignments are expanded where every branch of the script gives the same value. What only the shell
knows ($1, $(hostname), a variable of another file) stays as it is written. Each word keeps its
place in the text (compiler/decisions/044).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import NamedTuple

MOST_WORDS = 4096
MOST_CHARACTERS = 512 * 1024
_MOST_EXPANDED = 2 * MOST_CHARACTERS
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?:(:?-)(.*))?\}|\$([A-Za-z_]\w*)", re.DOTALL)
_EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?::?-[^{}$`]*)?\}|\$(?P<plain>[A-Za-z_]\w*)"
)
_EXPR = re.compile(r"\$\(expr ([^()]*)\)|`expr ([^`()]*)`")
_BLANKS_AND_WORDS = re.compile(r"(?:\$\([^()]*\)|`[^`]*`|\S)+|\s+")
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(-[^\s=]+)(?:[= \t]+(\S+))?", re.MULTILINE)
_PLACEHOLDER = re.compile(r"<[A-Z][A-Z0-9_ -]*[A-Z0-9]>")
# What a shell, jinja, OmegaConf or the user of an example (<MODEL>) fills in later; `${NAME:-4}`
# has a readable default.
_EXPRESSION = re.compile(rf"\$[A-Za-z_{{(0-9@*#?]|`|\{{\{{|\{{%|{_PLACEHOLDER.pattern}")
_DEFAULTED = re.compile(r"\$\{\w+:?-([^${}`]*)\}")
_OPENING = frozenset({"if", "for", "while", "until", "case"})
_CLOSING = frozenset({"fi", "done", "esac"})
_KEYWORDS = frozenset({"then", "else", "elif", "do", "!", "{", "}", "function"})
_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_TESTS = frozenset({"[", "[[", "test", "(("})
_SHELLS = ("bash", "sbatch", "sh", "zsh")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


class Piece(NamedTuple):
    """Hold a part of a word.

    start: where it stands in the script
    is_expression: the shell puts a value in its place; after reading, one that is not known
    is_split: no quotes are around it, so that its value may become several words
    possible: the words that branches of the script put in its place; None where nothing is known
    """

    text: str
    start: int
    is_expression: bool = False
    is_split: bool = False
    possible: Sequence[ShellWord] | None = None


class ShellWord(NamedTuple):
    """Hold a word.

    is_certain: False where a condition decides whether it is there
    array: before expansion, the words between the parentheses of NAME=(...)
    """

    pieces: list[Piece]
    is_certain: bool = True
    array: Sequence[ShellWord] | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def span(self) -> tuple[int, int]:
        """Return where it begins, and where its first piece ends."""
        first = self.pieces[0]
        return first.start, first.start + len(first.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """Hold a command after expansion, or an assignment.

    environment: the variables that it exports
    shell_words: of the command
    assigned: the words of the value, where it is an assignment
    is_certain: False inside a condition or a loop
    """

    environment: dict[str, str] = field(default_factory=dict)
    shell_words: Sequence[ShellWord] = ()
    assigned: Sequence[ShellWord] = ()
    is_certain: bool = True

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.shell_words)


class _Variable(NamedTuple):
    """Hold a variable's words. is_known: False where branches differ, or another file decides."""

    words: Sequence[ShellWord] = ()
    is_array: bool = False
    is_known: bool = True

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def slurm_directives(text: str) -> dict[str, str]:
    """Return the options of the #SBATCH lines, without dashes."""
    return {name.lstrip("-"): value or "" for name, value in _DIRECTIVE.findall(text)}


def read_shell_commands(text: str) -> list[ShellCommand]:
    """Return the commands in the order of the text. Raises ValueError where no shell reads it."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    statements, fault = read_shell_script(text)
    if fault:
        raise ValueError(fault)
    commands = [statement for statement in statements if statement.shell_words]
    if sum(len(command.shell_words) for command in commands) > MOST_WORDS:
        raise ValueError(f"it has more than {MOST_WORDS} words")
    return commands


def read_shell_script(text: str) -> tuple[list[ShellCommand], str]:
    """Return the commands and assignments in the order of the text, and why no shell reads it.

    What is open at the end of the text ends there.
    """
    tokens, reader = _Tokens(text), _Reader()
    statements = [*reader.statements(tokens)]
    too_long = f"its variables have more than {_MOST_EXPANDED} characters"
    return statements, tokens.fault or (too_long if reader.expanded > _MOST_EXPANDED else "")


def reread(words: Iterable[ShellWord]) -> Iterator[ShellWord]:
    """Yield the words as a second shell reads them, without quotes; in the place of a variable,
    the words that branches of the script give it."""
    for word in words:
        for part in _fields((piece, True) for piece in word.pieces):
            possible = part.pieces[0].possible if len(part.pieces) == 1 else None
            for found in [part] if possible is None else possible:
                yield found if word.is_certain else found._replace(is_certain=False)


def resolved_text(text: str) -> str | None:
    """Return a text with the defaults of ${NAME:-default}; None where an expression is left."""
    found = _DEFAULTED.sub(lambda match: match[1].strip("\"'"), text)
    return None if _EXPRESSION.search(found) else found


def _fields(parts: Iterable[tuple[Piece, bool]]) -> list[ShellWord]:
    """Join pieces to words; a piece with True is split at its white space."""
    words: list[ShellWord] = []
    is_open = False
    for piece, is_split in parts:
        if not is_split or piece.is_expression:
            found = [piece]
        else:
            matches = _BLANKS_AND_WORDS.finditer(piece.text)
            found = [piece._replace(text=m[0], start=piece.start + m.start()) for m in matches]
        for part in found:
            if is_split and part.text.isspace():
                is_open = False
                continue
            if not is_open:
                words.append(ShellWord([]))
            words[-1].pieces.append(part)
            is_open = True
    return words


class _Tokens:
    """Split a text into words and operators; comments and redirections go.

    start: where the text stands in the script
    documents: the here-documents since the last operator
    fault: what is open at the end of the text
    """

    def __init__(self, text: str, start: int = 0) -> None:
        # The same length, so that places stay.
        self.text = text.replace("\\\r\n", " \\\n").replace("\r\n", " \n")
        self.start, self.at = start, 0
        self.documents: list[_Tokens] = []
        self.fault = ""

    def read(self, until: str = "") -> Iterator[ShellWord | str]:
        word: ShellWord | None = None
        text = self.text
        is_redirected = False
        while self.at < len(text):
            char = text[self.at]
            if text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "<" and (placeholder := _PLACEHOLDER.match(text, self.at)):
                word = word or ShellWord([])
                self._add(word, self.at, placeholder.end())
            elif char in " \t\n;&|()<>":
                if word and char == "(" and not until and _ASSIGNED.fullmatch(word.text):
                    self.at += 1
                    items = [item for item in self.read(until=")") if isinstance(item, ShellWord)]
                    word = word._replace(array=items)
                    continue
                if word and not (char in "<>" and word.text.isdigit()):
                    if not is_redirected:
                        yield word
                    is_redirected = False
                word = None
                if char in " \t":
                    self.at += 1
                elif char in "<>" or text.startswith("&>", self.at):
                    is_redirected = self._redirection()
                else:
                    double = text[self.at : self.at + 2]
                    operator = double if double in ("&&", "||", ";;") else char
                    self.at += len(operator)
                    if char == until:
                        return
                    is_redirected = False
                    yield operator
            elif char == "#" and word is None:
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                word = word or ShellWord([])
                self._piece(word)
        if word and not is_redirected:
            yield word
        if until:
            self._end("no closing parenthesis")

    def _redirection(self) -> bool:
        """Move behind the operator; return whether the next word is the file."""
        operator = self._match(r"&?[<>]{1,3}(?:&-?\d?)?-?")
        if not operator.startswith("<<") or operator.startswith("<<<"):
            return not re.search(r"&(?:\d|-)$", operator)
        name = re.compile(r"\s*['\"]?(\w+)['\"]?[^\n]*\n").match(self.text, self.at)
        self.at = len(self.text)
        if name is not None:
            last = re.compile(rf"^[ \t]*{name[1]}[ \t]*$", re.MULTILINE)
            end = last.search(self.text, name.end())
            self.at = self.at if end is None else end.end()
            body = self.text[name.end() : self.at if end is None else end.start()]
            self.documents.append(_Tokens(body, self.start + name.end()))
        return False

    def _piece(self, word: ShellWord, is_quoted: bool = False) -> None:
        start = self.at
        char = self.text[start]
        if char in "$`":
            self._expression()
            self._add(word, start, self.at, True, not is_quoted)
        elif char == "\\":
            is_escape = not is_quoted or self.text[start + 1 : start + 2] in ('"', "\\", "$", "`")
            self._add(word, start + is_escape, start + 2)
        elif is_quoted:
            self._match(r'[^"\\$`]+')
            self._add(word, start, self.at)
        elif char == "'":
            self._find("'", "no closing quotation")
            self._add(word, start + 1, self.at - 1)
            self.at += 1
        elif char == '"':
            self.at += 1
            before = len(word.pieces)
            while self.at < len(self.text) and self.text[self.at] != '"':
                if self.text.startswith("\\\n", self.at):
                    self.at += 2
                else:
                    self._piece(word, is_quoted=True)
            if len(word.pieces) == before:
                self._add(word, self.at, self.at)  # an empty word
            if self.at >= len(self.text):
                self._end("no closing quotation")
            self.at += 1
        else:
            self._match(r"[^ \t\n;&|()<>\\'\"$`]+")
            self._add(word, start, self.at)

    def _expression(self) -> None:
        """Move behind $NAME, ${...}, $(...) or `...`."""
        start = self.at
        if self.text[start] == "`":
            return self._find("`", "no closing backquote")
        opening = self.text[start + 1 : start + 2]
        closing = {"{": "}", "(": ")"}.get(opening)
        if closing is None:
            self._match(r"\$(?:\w+|[@*#?$!-])?")
            return None
        depth = 0
        for match in re.compile(rf"[{opening}{closing}]").finditer(self.text, start + 1):
            depth += 1 if match[0] == opening else -1
            if depth == 0:
                self.at = match.end()
                return None
        return self._end(f"no closing {closing}")

    def _add(
        self,
        word: ShellWord,
        start: int,
        end: int,
        is_expression: bool = False,
        is_split: bool = False,
    ) -> None:
        place = self.start + start
        word.pieces.append(Piece(self.text[start:end], place, is_expression, is_split))
        self.at = end

    def _match(self, pattern: str) -> str:
        """Move behind a text that is there."""
        match = re.compile(pattern).match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match[0]

    def _find(self, char: str, fault: str) -> None:
        """Move behind the next such character."""
        at = self.text.find(char, self.at + 1)
        if at < 0:
            self._end(fault)
        self.at = at + 1 if at >= 0 else len(self.text) + 1

    def _end(self, fault: str) -> None:
        self.fault = self.fault or fault
        self.at = len(self.text)


class _Reader:
    """Follow the assignments of a script. expanded: the characters of values that were put in."""

    def __init__(self) -> None:
        self.variables: dict[str, _Variable] = {}
        self.exported: set[str] = set()
        self.depth = 0
        self.expanded = 0

    def statements(self, tokens: _Tokens) -> Iterator[ShellCommand]:
        statement: list[ShellWord] = []
        is_conditional = False
        for token in chain(tokens.read(), "\n"):
            if isinstance(token, ShellWord):
                statement.append(token)
                continue
            first = statement[0].text if statement else ""
            documents, tokens.documents = tokens.documents, []
            for command in self._run(statement, is_conditional):
                yield command
                if tokens.start == 0 and any(word.endswith(_SHELLS) for word in command.words):
                    for document in documents:
                        yield from self.statements(document)
            is_conditional = token in ("&&", "||") and (is_conditional or first in _TESTS)
            statement = []

    def _run(self, statement: list[ShellWord], is_conditional: bool) -> Iterator[ShellCommand]:
        while statement and statement[0].text in _KEYWORDS | _OPENING | _CLOSING:
            keyword = statement.pop(0).text
            self.depth += (keyword in _OPENING) - (keyword in _CLOSING)
            if keyword in ("for", "case"):
                if statement and keyword == "for":
                    items = [found for word in statement[2:] for found in self._expand(word)]
                    words = [word._replace(is_certain=False) for word in items]
                    self.variables[statement[0].text] = _Variable(words, is_known=False)
                return
        if statement and statement[0].text in _TESTS:
            return
        is_conditional |= self.depth > 0
        if statement and statement[0].text in _DECLARING:
            declaring = statement.pop(0).text
            names = [word for word in statement if not word.text.startswith("-")]
            for word in names:
                yield from self._assign(word, is_conditional)
                if declaring == "export" or any(w.text == "-x" for w in statement):
                    self.exported.add(re.split(r"\+?=", word.text)[0])
            return
        leading = [*takewhile(lambda word: _ASSIGNED.match(word.pieces[0].text), statement)]
        if len(leading) == len(statement):
            for word in leading:
                yield from self._assign(word, is_conditional)
            return
        words = [found for word in statement[len(leading) :] for found in self._expand(word)]
        environment: dict[str, str] = {}
        for name in sorted(self.exported):
            variable = self._variable(name, is_copied=False)
            if variable and variable.is_known and not variable.is_array:
                environment[name] = variable.text
        for word in leading:
            name, _, value = ShellWord(self._parts(word)).text.partition("=")
            environment[name.rstrip("+")] = value
        if words:
            certain = not is_conditional
            yield ShellCommand(environment=environment, shell_words=words, is_certain=certain)

    def _assign(self, word: ShellWord, is_conditional: bool) -> Iterator[ShellCommand]:
        match = _ASSIGNED.match(word.text)
        if match is None:
            return
        is_array, appends = word.array is not None, bool(match[2])
        first, *others = self._parts(word)
        start = first.start + match.end()
        value = [ShellWord([first._replace(text=first.text[match.end() :], start=start), *others])]
        if word.array is not None:
            value = [found for item in word.array for found in self._expand(item)]
        before = self._variable(match[1], is_copied=False) or _Variable(is_known=False)
        after = _Variable(value, is_array)
        if appends and before.is_known and before.is_array == is_array:
            words = [*before.words, *value]
            joined = [ShellWord([piece for word in words for piece in word.pieces])]
            after = _Variable(words if is_array else joined, is_array)
        elif appends:
            after = _Variable([*before.words, *reread(value)], is_array, is_known=False)
        is_same = before.is_known and after.is_known and before.text == after.text
        if is_conditional and not is_same:  # words that both branches begin with are certain
            old, new = [*reread(before.words)], [*reread(after.words)]
            pairs = enumerate(zip(old, new, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(old), len(new)))
            value = [word._replace(is_certain=False) for word in new[same:]]
            kept = [word._replace(is_certain=False) for word in old[same:]]
            after = _Variable([*old[:same], *kept, *value], is_known=False)
        self.variables[match[1]] = after
        yield ShellCommand(assigned=value, is_certain=not is_conditional)

    def _parts(self, word: ShellWord) -> list[Piece]:
        """Return the pieces of a word that is not split."""
        return [part for piece in word.pieces for part, _ in self._expanded(piece)]

    def _expand(self, word: ShellWord) -> list[ShellWord]:
        return _fields(part for piece in word.pieces for part in self._expanded(piece))

    def _expanded(self, piece: Piece) -> Iterator[tuple[Piece, bool]]:
        """Yield what an expression stands for, and whether this is split; the expression where
        only the shell knows."""
        match = _VARIABLE.fullmatch(piece.text) if piece.is_expression else None
        if match is None:
            text = piece.text
            if piece.is_expression:
                text = _EXPANSION.sub(self._text, piece.text)
                if (sum_ := _EXPR.fullmatch(text)) is not None:
                    total = _whole_number((sum_[1] or sum_[2]).replace("\\", ""))
                    text = text if total is None else str(total)
            is_left = piece.is_expression and re.search("[$`]", text) is not None
            yield piece._replace(text=text, is_expression=is_left), piece.is_split
            return
        name, dash, default = match[1] or match[4], match[2], match[3]
        variable = self._variable(name)
        if variable is None:
            default = _EXPANSION.sub(self._text, default or "")
            text = f"${{{name}{dash}{default}}}" if dash else piece.text
            yield piece._replace(text=text), False
        elif not variable.is_known:
            text = f"${{{name}}}" if dash else piece.text
            yield piece._replace(text=text, possible=variable.words), False
        else:
            for n, word in enumerate(variable.words):
                if n:
                    yield Piece(" ", piece.start), True
                yield from (
                    (part, piece.is_split and not variable.is_array) for part in word.pieces
                )

    def _text(self, match: re.Match[str]) -> str:
        """Return the value of a sum or a variable within another expression."""
        if match["sum"] is not None:
            text = re.sub(r"(?<!\$)\b([A-Za-z_]\w*)", r"$\1", match["sum"])
            total = _whole_number(_EXPANSION.sub(self._text, text))
            return match[0] if total is None else str(total)
        variable = self._variable(match["braced"] or match["plain"])
        return variable.text if variable and variable.is_known else match[0]

    def _variable(self, name: str, is_copied: bool = True) -> _Variable | None:
        """Return a variable; an unknown one where the values that were put in are too long."""
        variable = self.variables.get(name)
        if self.expanded <= _MOST_EXPANDED and variable is not None:
            pieces = [piece for word in variable.words for piece in word.pieces]
            self.expanded += (
                sum(len(piece.text) + 4 for piece in pieces) if is_copied else len(pieces)
            )
        return variable if self.expanded <= _MOST_EXPANDED else _Variable(is_known=False)


def _whole_number(text: str) -> int | None:
    if len(text) > 200 or not re.fullmatch(r"[\d\s+*/()-]+", text):
        return None
    try:
        return _computed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
        if abs(value) < 2**53:
            return value
    raise ValueError(ast.dump(node))
