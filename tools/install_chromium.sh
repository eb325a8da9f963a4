#!/bin/sh
# Installs Debian's Chromium and its driver where they are absent, for tests/browser. Says so where it cannot, and fails.
set -u

for pair in "chromium chromedriver" "google-chrome chromedriver" "chromium-browser chromedriver"; do
    # shellcheck disable=SC2086
    set -- $pair
    if command -v "$1" >/dev/null && command -v "$2" >/dev/null; then
        echo "Chromium is there: $(command -v "$1")"
        exit 0
    fi
done

without() {
    echo "No Chromium: $1. The tests of the HTML report in a browser are skipped."
    exit 1
}

command -v apt-get >/dev/null || without "it is not installed, and there is no apt-get"
root=""
if [ "$(id -u)" -ne 0 ]; then
    { command -v sudo >/dev/null && sudo -n true 2>/dev/null; } || without "apt-get needs root, or sudo without a password"
    root="sudo -n"
fi
echo "Installing Chromium and its driver with apt-get"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { $root apt-get update && $root apt-get install -y --no-install-recommends chromium chromium-driver; } >"$log" 2>&1; then
    tail -3 "$log"
    without "apt-get could not install it"
fi
