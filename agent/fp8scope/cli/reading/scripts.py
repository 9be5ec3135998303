"""Scripts of shells, in which `completion` fills in commands and options."""

from typing import Final

BASH: Final = r"""# fp8scope: completion for bash
_fp8scope() {
    local current="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W @COMMANDS@ -- "$current"))
        return
    fi
    case "$command" in
@CASES@
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
        return
    fi
    case "$command" in
    @NAMED@)
        local ids="" beginning="${current#[\"\']}" name
        case "$command" in @IDS@) ids=--ids ;; esac
        beginning="${beginning//\\/}"
        while IFS= read -r name; do
            case "$current" in
            [\"\']*) COMPREPLY+=("$name") ;;
            *) COMPREPLY+=("$(printf '%q' "$name")") ;;
            esac
        done < <(fp8scope completion --runs "$beginning" $ids 2>/dev/null)
        ;;
    *)
        COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current"))
        ;;
    esac
}
complete -o nosort -F _fp8scope fp8scope 2>/dev/null || complete -F _fp8scope fp8scope
"""

ZSH: Final = r"""#compdef fp8scope
# fp8scope: completion for zsh
_fp8scope() {
    local words_of="" command="${words[2]}"
    local current="${(Q)PREFIX}"
    if (( CURRENT == 2 )); then
        compadd -- ${(s: :)${:-@COMMANDS@}}
        return
    fi
    case "$command" in
@CASES@
    esac
    if [[ "$PREFIX" == -* ]]; then
        compadd -- ${(s: :)words_of}
        return
    fi
    case "$command" in
    @NAMED@)
        local ids=() runs=()
        case "$command" in @IDS@) ids=(--ids) ;; esac
        runs=("${(@f)$(fp8scope completion --runs "$current" $ids 2>/dev/null)}")
        (( ${#runs[1]} )) && compadd -- "${runs[@]}"
        ;;
    *)
        compadd -- ${(s: :)words_of}
        _files
        ;;
    esac
}
if [ "$funcstack[1]" = "_fp8scope" ]; then
    _fp8scope "$@"
else
    compdef _fp8scope fp8scope
fi
"""

FISH: Final = r"""# fp8scope: completion for fish
complete -c fp8scope -f -n __fish_use_subcommand -a @COMMANDS@"""

FISH_OPTION: Final = r"""complete -c fp8scope -n '__fish_seen_subcommand_from @COMMAND@' -l @WORD@"""
FISH_WORD: Final = r"""complete -c fp8scope -n '__fish_seen_subcommand_from @COMMAND@' -a @WORD@"""
FISH_RUNS: Final = (
    r"""complete -c fp8scope -f -n '__fish_seen_subcommand_from @COMMAND@' """
    r"""-a '(fp8scope completion --runs (commandline -ct)@IDS@ 2>/dev/null)'"""
)
