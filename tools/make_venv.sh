#!/bin/sh
# Makes the project's own environment, or brings it up to date: make_venv.sh VENV EXTRAS
# Checks the machine first. Does nothing where VENV already holds EXTRAS for these pyproject.toml and constraints.txt.
set -eu

venv=$1
extras=$2
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"

echo "[1/3] Checking the machine"
python=$(sh tools/check_machine.sh)

stamp="$venv/.fxopt-$(printf '%s' "$extras" | tr ',' '+')"
wanted=$("$python" -c 'import hashlib, sys
digest = hashlib.sha256(sys.version.encode())
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        digest.update(file.read())
print(digest.hexdigest())' pyproject.toml constraints.txt)

# The stamp holds a hash over the interpreter's version and both files: another PYTHON, or a changed pin, installs
# anew; a fresh checkout's file times do not.
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$venv/bin/python" ]; then
    echo "[2/3] $venv is up to date"
    echo "[3/3] Nothing to install"
    exit 0
fi

theirs=$("$python" -c 'import sys; print(sys.version)')
if [ -x "$venv/bin/python" ] && [ "$("$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null)" = "$theirs" ]; then
    echo "[2/3] Using the environment in $venv"
else
    echo "[2/3] Making an environment in $venv with $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

echo "[3/3] Installing fxopt[$extras] and the pinned set into $venv (torch is by far the largest part)"
"$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[$extras]"
printf '%s\n' "$wanted" >"$stamp"
