"""``completion``: scripts that complete commands, options and values in bash, zsh and fish.

The script holds all that the parser knows, so that no key of the user starts this program.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence

import attrs

from .parse import PROGRAM, Parser, build_parser, describing

if not describing():
    from ..events import DEFAULT_CATALOG
    from .terminal import print_text

SHELLS = ("bash", "zsh", "fish")

#: The metavariables of event types.
_TYPES = ("TYPE", "T")


@attrs.frozen
class Option:
    """An option: its ``names``, and whether and which ``values`` it takes; none are any text."""

    names: tuple[str, ...]
    about: str
    takes_value: bool
    values: tuple[str, ...] = ()


@attrs.frozen
class Junction:
    """The things that may follow ``words``: further words, options, and arguments by position."""

    words: str
    further: dict[str, str]
    options: tuple[Option, ...]
    values: tuple[str, ...] = ()


def completion_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads it")


def complete(arguments: Namespace) -> int:
    """Print the script of a shell."""
    found = tuple(levels(build_parser(alone=True), [row.wire_type for row in DEFAULT_CATALOG]))
    print_text(fish_script(found) if arguments.shell == "fish" else bash_script(found))
    return 0


def levels(parser: Parser, types: Sequence[str], words: str = "") -> Iterator[Junction]:
    """Return what may follow each word of the command line; ``types`` are the event types."""
    parser.fill()
    further: dict[str, str] = {}
    options: list[Option] = []
    values: list[str] = []
    below: list[tuple[str, Parser]] = []
    for action in parser._actions:
        of_type = action.dest == "type" and action.metavar in _TYPES
        offered = tuple(map(str, types if of_type else action.choices or ()))
        if isinstance(action, argparse._SubParsersAction):
            further = {one.dest: one.help or "" for one in action._choices_actions}
            below = [(f"{words} {word}".lstrip(), action.choices[word]) for word in further]
        elif action.option_strings:
            takes = action.nargs != 0
            names = tuple(action.option_strings)
            options.append(Option(names, action.help or "", takes, offered))
        else:
            values += offered
    if not words:
        further |= {"help": "say what a command takes", "version": "print the version"}
    yield Junction(words, further, tuple(options), tuple(values))
    for name, inner in below:
        yield from levels(inner, types, name)


_BASH = """\
# Completion of {program} for bash and zsh: eval "$({program} completion bash)"
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_{name}() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local chosen="" reply="" word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        case "|{paths}|" in
            *"|${{chosen:+$chosen }}$word|"*) chosen="${{chosen:+$chosen }}$word" ;;
        esac
    done
    case "$chosen $prev" in
{values}
    esac
    if [ -z "$reply" ]; then
        case "$chosen" in
{words}
        esac
    fi
    COMPREPLY=($(compgen -W "$reply" -- "$cur"))
}}
complete -o default -F _{name} {program}"""


def bash_script(found: Sequence[Junction]) -> str:
    """Return the script for bash, which zsh reads as well."""
    values, words = [], []
    for level in found:
        for option in level.options:
            if option.values:
                patterns = " | ".join(f'"{level.words} {name}"' for name in option.names)
                values.append(f'        {patterns}) reply="{" ".join(option.values)}" ;;')
        names = [name for option in level.options for name in option.names]
        offered = " ".join((*level.further, *level.values, *names))
        words.append(f'            "{level.words}") reply="{offered}" ;;')
    return _BASH.format(
        program=PROGRAM,
        name=PROGRAM.replace("-", "_"),
        paths="|".join(level.words for level in found if level.words),
        values="\n".join(values),
        words="\n".join(words),
    )


_FISH = """\
# Completion of {program} for fish: {program} completion fish | source
function __{name}_chosen
    set --local chosen ""
    set --local words (commandline --tokenize --current-process --cut-at-cursor)
    for word in $words[2..]
        set --local longer (string trim -- "$chosen $word")
        if contains -- "$longer" {paths}
            set chosen "$longer"
        end
    end
    test "$chosen" = "$argv"
end"""


def fish_script(found: Sequence[Junction]) -> str:
    """Return the script for fish."""
    name = PROGRAM.replace("-", "_")
    paths = " ".join(f"'{level.words}'" for level in found if level.words)
    lines = [_FISH.format(program=PROGRAM, name=name, paths=paths)]
    for level in found:
        begin = f"complete -c {PROGRAM} -n \"__{name}_chosen '{level.words}'\""
        if level.further or level.values:
            lines.append(f"{begin} -f")
        lines += [f"{begin} -a {word} -d {_quoted(text)}" for word, text in level.further.items()]
        if level.values:
            lines.append(f"{begin} -a {_quoted(' '.join(level.values))}")
        for option in level.options:
            flags = "".join(
                f" -l {each[2:]}" if each.startswith("--") else f" -s {each[1:]}"
                for each in option.names
            )
            value = f" -x -a {_quoted(' '.join(option.values))}" if option.values else ""
            required = " -r" if option.takes_value and not option.values else ""
            lines.append(f"{begin}{flags}{required}{value} -d {_quoted(option.about)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("%%", "%") + "'"
