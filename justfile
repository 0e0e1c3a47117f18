# Tasks; `just` lists them. All run in the environment that is active.

steps := "lint types layers test docs"

_default:
    @just --list --unsorted

# everything that CI runs, each step to its end
check:
    #!/usr/bin/env bash
    set -uo pipefail
    status=0 summary=()
    for step in {{ steps }}; do
        echo "==> just $step"
        started=$SECONDS
        just "$step"
        code=$?
        [ $code = 0 ] && word=passed || word="FAILED ($code)"
        [ $status != 0 ] || status=$code
        summary+=("$(printf '%-8s %-12s %5d s' "$step" "$word" $((SECONDS - started)))")
    done
    printf '%s\n' "==> summary" "${summary[@]}"
    exit $status

# style and formatting
lint:
    ruff check
    ruff format --check

# static types
types:
    pyright

# which room may know which
layers:
    lint-imports

# the tests that this machine can run, or those named: `just test tests/cpu -k config`
test *args:
    pytest {{ args }}

# the documentation site, in site/; a broken link or reference is an error
docs:
    zensical build --clean --strict

# write what the pages take from the code
generate:
    python tools/generate_docs.py

# let ruff mend what it can
fix:
    ruff check --fix
    ruff format
