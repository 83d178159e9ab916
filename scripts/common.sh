# Sourced by the other scripts: sentences, steps and their times.

set -euo pipefail
# What is built is for others, too: programs of any user read the files of an image.
umask 022
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/jiffy
target=${CARGO_TARGET_DIR:-$root/target}
dist=${DIST:-$root/dist}
# The triple is fixed in .cargo/config.toml: every binary is static.
triple=x86_64-unknown-linux-gnu
times=()

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# step NAME COMMAND…: says what begins, runs it (variables it sets are lost),
# notes how long it took.
step() {
    local name=$1 begin=$SECONDS status
    shift
    echo "==> $name" >&2
    # In a shell of its own, not tested by `||`: so it ends at its first error.
    set +e
    (set -e; "$@")
    status=$?
    set -e
    times+=("$(printf '%5d s  %s' $((SECONDS - begin)) "$name")")
    ((status == 0)) || {
        summary
        fail "$name failed; what went wrong is above"
    }
}

summary() {
    ((${#times[@]} == 0)) || printf '%s\n' "${times[@]}" >&2
}
