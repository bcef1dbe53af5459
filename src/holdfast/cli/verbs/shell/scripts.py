"""Completion scripts for bash, zsh and fish, written from the list of commands; names are asked from the store."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from holdfast.cli.verbs.shell.words import Command, Option, Value

_MAX_HELP: Final = 60

# The words before the cursor are read once: verbs and actions extend `verb`, options that take a value skip it, and
# the store of -s is passed on, so that names come from that store.
_READ_WORD: Final = """\
        if [[ -n $skip ]]; then
            [[ $skip == store ]] && store=(-s "$word")
            skip=""
        elif [[ $word == -s || $word == --store ]]; then
            skip=store
        elif _holdfast_value "$verb $word" >/dev/null; then
            skip=value
        elif [[ $word != -* ]] && _holdfast_next "${{verb:+$verb }}$word"; then
            verb="${{verb:+$verb }}$word"
        fi
    done
    if [[ $skip == store ]]; then
        kind=files
    elif [[ $skip == value ]]; then
"""
"""What bash and zsh do with each word before the cursor: the rest of a loop over `word`, and what follows it."""

_BASH: Final = (
    """\
# Completion of holdfast for bash:  source <(holdfast completion bash)
_holdfast_next() {{
    case "$1" in
{next}
    esac
    return 1
}}
_holdfast_value() {{
    case "$1" in
{values}
    esac
    return 1
}}
_holdfast() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" verb="" skip="" kind="" words="" word i line
    local -a store=()
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
"""
    + _READ_WORD
    + """\
        kind="$(_holdfast_value "$verb ${{COMP_WORDS[COMP_CWORD-1]}}")"
    else
        case "$verb" in
{verbs}
        esac
    fi
    if [[ $cur == -* && -z $skip ]]; then
        while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -W "$options" -- "$cur")
        return
    fi
    case "$kind" in
        names)
            while IFS= read -r line; do
                [[ $line == "$cur"* ]] && COMPREPLY+=("$(printf %q "$line")")
            done < <("${{COMP_WORDS[0]}}" "${{store[@]}}" completion --names "$cur" 2>/dev/null) ;;
        files)
            compopt -o filenames 2>/dev/null
            while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$cur") ;;
        *) while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -W "$kind $words" -- "$cur") ;;
    esac
}}
complete -F _holdfast holdfast
"""
)

_ZSH: Final = (
    """\
#compdef holdfast
# Completion of holdfast for zsh:  source <(holdfast completion zsh)
_holdfast_value() {{
    case "$1" in
{values}
    esac
    return 1
}}
_holdfast_next() {{
    case "$1" in
{next}
    esac
    return 1
}}
_holdfast() {{
    local cur="${{words[CURRENT]}}" verb="" skip="" kind="" word
    local -a store found verbs options
    for word in "${{(@)words[2,CURRENT-1]}}"; do
"""
    + _READ_WORD
    + """\
        kind="$(_holdfast_value "$verb ${{words[CURRENT-1]}}")"
    else
        case "$verb" in
{verbs}
        esac
    fi
    if [[ $cur == -* && -z $skip ]]; then
        _describe option options
        return
    fi
    case "$kind" in
        names)
            found=("${{(@f)$("${{words[1]}}" "${{store[@]}}" completion --names "$cur" 2>/dev/null)}}")
            compadd -M 'r:|/=*' -- "${{(@)found:#}}" ;;
        files) _files ;;
        "") (( $#verbs )) && _describe verb verbs ;;
        *) compadd -- ${{=kind}} ;;
    esac
}}
if [[ "${{funcstack[1]}}" == _holdfast ]]; then
    _holdfast "$@"
elif (( $+functions[compdef] )); then
    compdef _holdfast holdfast
fi
"""
)

_FISH: Final = """\
# Completion of holdfast for fish:  holdfast completion fish | source
function __holdfast_verb
    set -l verb
    set -l skip 0
    for word in (commandline -opc)[2..]
        if test $skip = 1
            set skip 0
        else if contains -- $word {valued}
            set skip 1
        else if not string match -q -- '-*' $word
            contains -- (string join ' ' $verb $word) {known}; and set -a verb $word
        end
    end
    string join ' ' $verb
end
function __holdfast_at
    set -l verb (__holdfast_verb)
    test "$verb" = "$argv[1]"
end
function __holdfast_names
    set -l tokens (commandline -opc)
    set -l store
    for at in (seq 2 (count $tokens))
        if contains -- $tokens[$at] -s --store; and test $at -lt (count $tokens)
            set store -s $tokens[(math $at + 1)]
        end
    end
    $tokens[1] $store completion --names (commandline -ct) 2>/dev/null
end
complete -c holdfast -e
complete -c holdfast -f
{lines}
"""


def render_script(shell: str, commands: Sequence[Command]) -> str:
    """Return the completion script of a shell."""
    return _RENDERERS[shell](commands)


def _render_bash(commands: Sequence[Command]) -> str:
    verbs = [
        f"            {_quote(command.words)}) options={_quote(_join_options(command))};"
        f" words={_quote(_join(name for name, _ in command.verbs))}; kind={_quote(_spell(command.value))} ;;"
        for command in commands
    ]
    return _BASH.format(next=_render_next(commands), values=_render_values(commands), verbs="\n".join(verbs))


def _render_zsh(commands: Sequence[Command]) -> str:
    verbs = []
    for command in commands:
        options = [
            _quote(f"{spelling}:{_shorten(option.help)}") for option in command.options for spelling in option.spellings
        ]
        names = [_quote(f"{name}:{_shorten(summary)}") for name, summary in command.verbs]
        kind = _quote("" if command.verbs else _spell(command.value))
        verbs.append(
            f"            {_quote(command.words)}) options=({_join(options)}); verbs=({_join(names)}); kind={kind} ;;"
        )
    return _ZSH.format(next=_render_next(commands), values=_render_values(commands), verbs="\n".join(verbs))


def _render_fish(commands: Sequence[Command]) -> str:
    lines = [line for command in commands for line in _list_fish_lines(command)]
    valued = {name for command in commands for option in command.options if option.value for name in option.spellings}
    known = _join(_quote(command.words) for command in commands if command.words)
    return _FISH.format(valued=_join(sorted(valued)), known=known, lines="\n".join(lines))


def _list_fish_lines(command: Command) -> list[str]:
    begin = f"complete -c holdfast -n {_quote(f'__holdfast_at {_quote(command.words)}')}"
    lines = [f"{begin} -a {_quote(name)} -d {_quote(_shorten(summary))}" for name, summary in command.verbs]
    if not command.verbs:
        lines += [f"{begin} {text}" for text in _spell_fish(command.value)]
    return lines + [f"{begin} {_spell_fish_option(option)}" for option in command.options]


def _spell_fish(value: Value) -> list[str]:
    match value.kind:
        case "names":
            return ["-a '(__holdfast_names)'"]
        case "files":
            return ["-F"]
        case "choices":
            return [f"-a {_quote(_join(value.choices))}"]
        case _:
            return []


def _spell_fish_option(option: Option) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.spellings]
    value = ["-r", *_spell_fish(option.value)] if option.value else []
    return _join([*names, *value, f"-d {_quote(_shorten(option.help))}"])


def _render_next(commands: Sequence[Command]) -> str:
    """Return the case that knows every verb and action."""
    return "        " + "|".join(_quote(command.words) for command in commands if command.words) + ") return 0 ;;"


def _render_values(commands: Sequence[Command]) -> str:
    """Return the cases that print what an option takes, for each verb and option."""
    lines = [
        f"        {'|'.join(_quote(f'{command.words} {name}') for name in option.spellings)})"
        f" echo {_quote(_spell(option.value))}; return 0 ;;"
        for command in commands
        for option in command.options
        if option.value is not None
    ]
    return "\n".join(lines)


def _spell(value: Value) -> str:
    """Return how a script names a kind of value: the kind, or the words to choose from."""
    return _join(value.choices) if value.kind == "choices" else "" if value.kind == "nothing" else value.kind


def _join_options(command: Command) -> str:
    return _join(spelling for option in command.options for spelling in option.spellings)


def _join(words: Iterable[str]) -> str:
    return " ".join(words)


def _quote(text: str) -> str:
    return shlex.quote(text)


def _shorten(text: str) -> str:
    """Return the beginning of a help text, without what has a meaning in completion scripts."""
    plain = text.partition(";")[0].replace(":", "").replace("`", "").replace("'", "")
    return plain if len(plain) <= _MAX_HELP else f"{plain[: _MAX_HELP - 3]}..."


_RENDERERS: Final[Mapping[str, Callable[[Sequence[Command]], str]]] = {
    "bash": _render_bash,
    "zsh": _render_zsh,
    "fish": _render_fish,
}
SHELLS: Final = tuple(_RENDERERS)
