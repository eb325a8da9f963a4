#!/bin/sh
# What has to be on the machine before anything is installed: a Python that torch has wheels for, with venv,
# pip and its headers, and a C++ compiler with OpenMP (Inductor compiles C++ for the CPU, against Python.h).
#
# usage: check_machine.sh        (PYTHON and CXX from the environment, where set)
# Prints the chosen interpreter on stdout. All absences are reported at once on stderr, each with its remedy;
# the exit status is then 1.
set -u

oldest="3.10"
beyond="3.14"
missing=0

say() { printf '%s\n' "$*" >&2; }

# The package manager's own words for a remedy, for the managers that we know.
if command -v apt-get >/dev/null 2>&1; then manager=apt
elif command -v dnf >/dev/null 2>&1; then manager=dnf
elif command -v brew >/dev/null 2>&1; then manager=brew
else manager=unknown
fi

# lacks WHAT APT DNF BREW
lacks() {
    missing=$((missing + 1))
    say "  missing: $1"
    case $manager in
        apt) say "    remedy: sudo apt-get update && sudo apt-get install -y $2" ;;
        dnf) say "    remedy: sudo dnf install -y $3" ;;
        brew) say "    remedy: $4" ;;
        *) say "    remedy: install it with this system's package manager (Debian: $2; Fedora: $3)" ;;
    esac
}

in_range() {
    "$1" -c 'import sys; low, high = (tuple(map(int, v.split("."))) for v in sys.argv[1:])
sys.exit(not low <= sys.version_info[:2] < high)' "$oldest" "$beyond" >/dev/null 2>&1
}

# --- Python -----------------------------------------------------------------------------------------------
# A name on PATH is not enough: version managers leave shims for interpreters that are not switched on.
python=""
if [ -n "${PYTHON:-}" ]; then
    if ! command -v "$PYTHON" >/dev/null 2>&1; then
        say "  missing: PYTHON=$PYTHON was asked for, and there is no such program"
        say "    remedy: give the path of a Python >= $oldest and < $beyond, or leave PYTHON out"
        missing=$((missing + 1))
    elif ! in_range "$PYTHON"; then
        say "  unusable: PYTHON=$PYTHON is $("$PYTHON" -V 2>&1 | head -n 1); needed: Python >= $oldest and < $beyond"
        say "    remedy: name another one, or leave PYTHON out"
        missing=$((missing + 1))
    else
        python=$PYTHON
    fi
else
    for candidate in python3.11 python3 python3.12 python3.13 python3.10; do
        if command -v "$candidate" >/dev/null 2>&1 && in_range "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        lacks "Python >= $oldest and < $beyond (torch has no wheels for others)" \
            "python3 python3-venv python3-dev" "python3.12 python3.12-devel" "brew install python@3.12"
    fi
fi

include=""
if [ -n "$python" ]; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # Debian ships `venv` without `ensurepip`, and the environment that it makes then has no pip.
    if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        lacks "venv and pip for $python ($version)" "python$version-venv" "python3-pip" "brew reinstall python@$version"
    fi
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [ ! -f "$include/Python.h" ]; then
        lacks "the headers of $python ($include/Python.h)" "python$version-dev" "python$version-devel" \
            "brew reinstall python@$version"
        include=""
    fi
fi

# --- C++ compiler -----------------------------------------------------------------------------------------
# Inductor's own choice: $CXX, else g++ (clang++ on macOS).
if [ -n "${CXX:-}" ]; then compiler=$CXX
elif [ "$(uname -s)" = Darwin ]; then compiler=clang++
else compiler=g++
fi
if ! command -v "$compiler" >/dev/null 2>&1; then
    if [ -n "${CXX:-}" ]; then
        missing=$((missing + 1))
        say "  missing: CXX=$CXX was asked for, and there is no such program"
        say "    remedy: give the path of a C++ compiler, or leave CXX out"
    else
        lacks "a C++ compiler ($compiler)" "g++" "gcc-c++" "xcode-select --install"
    fi
else
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    {
        [ -n "$include" ] && echo '#include <Python.h>'
        echo '#include <vector>'
        echo '#include <omp.h>'
        echo 'extern "C" int threads() { std::vector<int> one{1}; return one[0] * omp_get_max_threads(); }'
    } >"$scratch/probe.cpp"
    openmp="-fopenmp"
    # Apple's clang has OpenMP headers only through a package that Inductor finds by itself.
    [ "$(uname -s)" = Darwin ] && openmp="-fsyntax-only" && sed -i.bak '/omp/d' "$scratch/probe.cpp"
    if ! "$compiler" -std=c++17 -fPIC -shared $openmp ${include:+-I"$include"} "$scratch/probe.cpp" \
            -o "$scratch/probe.so" >"$scratch/log" 2>&1; then
        say "  $compiler cannot build a C++17 library with OpenMP; it said:"
        sed -n '1,6s/^/    | /p' "$scratch/log" >&2
        lacks "a working C++ compiler with OpenMP" "g++ libc6-dev" "gcc-c++ libgomp" "xcode-select --install"
    fi
fi

if [ "$missing" -gt 0 ]; then
    say ""
    say "This machine lacks $missing of the things that have to be there first (above, with remedies). Nothing was installed."
    exit 1
fi
say "  $("$python" -V 2>&1) ($python), its headers, venv and pip; $("$compiler" --version | head -n 1)"
printf '%s\n' "$python"
