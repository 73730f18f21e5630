"""The reader of shell scripts that `import` and `lint --for megatron` share: what is known of each
word, where it stands, and how far a text can grow.

More rows are in tests/migrate/test_imported_files.py and tests/lint/test_megatron.py."""

from __future__ import annotations

import re

import pytest

from shardwright.lint.megatron_script import read_arguments
from shardwright.utils.shell_script import (
    read_shell_commands,
    read_shell_script,
    reread,
    resolved_text,
)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('A="--x `pwd` --y"\nb $A', [("b", "--x", "`pwd`", "--y")]),
        ("if c; then A=4; fi\nb ${A:-2}", [("c",), ("b", "${A}")]),
        ("A=3\nB=4\nb ${A:-$B} ${C:-$B}", [("b", "3", "${C:-4}")]),
        ("b --m <MODEL> --n <IN>/x", [("b", "--m", "<MODEL>", "--n", "<IN>/x")]),
        ("b <in.txt >out.txt x", [("b", "x")]),
        ("N=2\nsbatch <<E\nb $N\nE\nb 3", [("sbatch",), ("b", "2"), ("b", "3")]),
        ("cat > f <<E\nb 2 'x\nE\nb 3", [("cat",), ("b", "3")]),
        ('A=(x y)\nb "1${A[@]}2" "$A"', [("b", "1x", "y2", "x", "y")]),
        ('A=()\nb "${A[@]}" "" $A', [("b", "")]),
        ("b a\\\r\n  c\r\nd", [("b", "a", "c"), ("d",)]),
    ],
)
def test_words(script: str, words: list[tuple[str, ...]]) -> None:
    assert [command.words for command in read_shell_commands(script)] == words


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("if c; then A='--x 1'; else A=--y; fi\nb $A", "b --x? 1? --y?"),
        ('A=--x\nif c; then A="$A --y"; fi\nb $A', "b --x --y?"),
        ("A=(--x)\n[ $C ] && A+=(--y)\nb ${A[@]}", "b --x --y?"),
        ("for A in 1 $B; do b $A; done", "b 1? $B?"),
        ("if c; then A=''; else A=; fi\nb $A", "b"),
        ('R=\'python x.py "$Y" $(a b)\'\nsh -c "$R"', 'sh -c python x.py "$Y" $(a b)'),
    ],
)
def test_words_of_a_second_shell(script: str, shown: str) -> None:
    """A ? follows a word that a condition decides on."""
    command = read_shell_script(script)[0][-1]
    marked = [
        f"{word.text}{'' if word.is_certain else '?'}" for word in reread(command.shell_words)
    ]
    assert " ".join(marked) == shown


def test_places() -> None:
    """A word stands where it is written: through variables, continued lines, here-documents."""
    script = 'A="\n  --x \\\n  --y"\r\nsbatch <<E\nb $A --z "--w=$B"\nE\n'
    command = read_shell_script(script)[0][-1]
    for word in reread(command.shell_words):
        start, end = word.span
        assert word.text.startswith(script[start:end]) and script[start:end] in (
            "b",
            "--x",
            "--y",
            "--z",
            "--w=",
        )


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("b 'x", "no closing quotation"),
        ('b "x', "no closing quotation"),
        ('b "', "no closing quotation"),
        ("b $(x", "no closing )"),
        ("b ${x", "no closing }"),
        ("b `x", "no closing backquote"),
        ("A=(x\nb", "no closing parenthesis"),
        ("A=x\n" + "A=$A$A\n" * 60 + "b $A", "its variables have more than 1048576 characters"),
        ("A=x\n" + 'if c; then A="$A $A"; fi\n' * 60, "its variables have more than"),
        ("b\n" * 5000, "it has more than 4096 words"),
    ],
)
def test_what_no_shell_reads(script: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}"):
        read_shell_commands(script)


def test_megatrons_options_are_read_as_a_shell_reads_them() -> None:
    script = (
        "N=$((3 * 2))\n[ $C ] && A=--fp16\nsbatch <<E\n"
        "torchrun pretrain_gpt.py --num-layers $N $A --save x 2>&1 | tee --append log\nE\n"
    )
    given = read_arguments("x.sh", script, 8).given
    assert [(g.name, g.values, g.is_certain) for g in given] == [
        ("--num-layers", ("6",), True),
        ("--fp16", (), False),
        ("--save", ("x",), True),
    ]


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("${A:-4}", "4"),
        ("a$", "a$"),
        ("$A", None),
        ("{{ a }}", None),
        ("<MODEL>", None),
        ("<pad>", "<pad>"),
    ],
)
def test_resolved_text(text: str, known: str | None) -> None:
    assert resolved_text(text) == known
