"""Scripts that complete what is typed in a shell. They hold all that they know, so completing starts no Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locallip.options import Option


@dataclass(frozen=True)
class Completed:
    """A command as completion sees it: its options, and the names that may stand behind it."""

    options: Mapping[str, Option]
    names: Sequence[str] = ()


#: In both shells an empty answer means files. A word such as --data=mnist is three words to bash.
_BASH = """# bash completion of locallip, written by `locallip completion bash`
_locallip() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} values=
    if [[ $current == = ]]; then current=; elif [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if ((COMP_CWORD == 1)); then values={commands}; else
{cases}
    fi
    COMPREPLY=($(compgen -W "$values" -- "$current"))
}}
complete -o default -F _locallip locallip
"""

_ZSH = """#compdef locallip
# zsh completion of locallip, written by `locallip completion zsh`
_locallip() {{
    local current=$words[CURRENT] before=$words[CURRENT-1] command=$words[2] values=
    if [[ $current == --*=* ]]; then before=${{current%%=*}}; compset -P '*='; current=$PREFIX; fi
    if ((CURRENT == 2)); then values={commands}; else
{cases}
    fi
    [[ -n $values ]] && compadd -- ${{=values}} || _files
}}
if [[ $funcstack[1] == _locallip ]]; then _locallip "$@"; else compdef _locallip locallip; fi
"""

_FISH = """# fish completion of locallip, written by `locallip completion fish`
"""


def script(shell: str, commands: Mapping[str, Completed]) -> str:
    """The script for bash, zsh or fish."""
    if shell == "fish":
        return _FISH + "".join(f"complete -c locallip {line}\n" for line in _fish_lines(commands))
    words = shlex.quote(" ".join([*commands, "--help", "--version"]))
    return {"bash": _BASH, "zsh": _ZSH}[shell].format(commands=words, cases="\n".join(_cases(commands)))


def _cases(commands: Mapping[str, Completed]) -> list[str]:
    """Shell code, the same for bash and zsh: `values` from the command, the word before and the beginning of this one."""
    lines = ['        case "$command $before $current" in']
    for name, command in commands.items():
        for option, known in command.options.items():
            if known.choices:
                lines.append(f'            "{name} {option} "*) values={shlex.quote(" ".join(known.choices))} ;;')
        valued = [
            f'"{name} {option} "*' for option, known in command.options.items() if known.takes_value and not known.choices
        ]
        if valued:
            lines.append(f"            {' | '.join(valued)}) ;;")
        lines.append(f'            "{name} "*" -"*) values={shlex.quote(" ".join([*command.options, "--help"]))} ;;')
        if command.names:
            lines.append(f'            "{name} {name} "*) values={shlex.quote(" ".join(command.names))} ;;')
    return [*lines, "        esac"]


def _fish_lines(commands: Mapping[str, Completed]) -> list[str]:
    lines = [f"-n __fish_use_subcommand -fa {shlex.quote(' '.join([*commands, '--help', '--version']))}"]
    for name, command in commands.items():
        here = f"-n '__fish_seen_subcommand_from {name}'"
        if command.names:
            first = f"-n '__fish_seen_subcommand_from {name}; and test (count (commandline -opc)) -eq 2'"
            lines.append(f"{first} -a {shlex.quote(' '.join(command.names))}")
        for option, known in command.options.items():
            value = f" -xa {shlex.quote(' '.join(known.choices))}" if known.choices else " -r" if known.takes_value else ""
            lines.append(f"{here} -l {option.removeprefix('--')}{value}")
        lines.append(f"{here} -l help")
    return lines
